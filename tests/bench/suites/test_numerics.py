"""`make bench SUITE=numerics`: the counts of right answers."""

from pathlib import Path

import pytest

from bench.suites import numerics
from gpt2.system.errors import UserError
from tests.bench.sessions import run_small


def test_right_and_wrong_answers_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run_small(numerics.SUITE, tmp_path, monkeypatch, cases="other order of sequences")
    assert [answer["right"] for answer in data["faults"]] == [True, True, False] * 2
    assert data["clean pairs"] == []
    printed = capsys.readouterr().out
    assert "wrong: other order of sequences, ours, modules: rounding" in printed
    assert "faults answered rightly by every model: checksums 1 of 1 (2 of 2 comparisons)" in printed
    assert "modules 0 of 1 (0 of 2 comparisons)" in printed


def test_an_unknown_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no fault and no clean pair has 'x y z' in its name"):
        run_small(numerics.SUITE, tmp_path, monkeypatch, cases="x y z")
