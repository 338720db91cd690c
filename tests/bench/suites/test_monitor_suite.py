"""The suite of the monitor: every mode is timed in every round."""

import dataclasses
from pathlib import Path

import pytest

from bench.observed_step import ObservedShape
from bench.suites.monitor import OBSERVED
from tests.bench.sessions import run_small

SMALL = ObservedShape("small", 2, 2, 16, 8, 2)


@pytest.mark.usefixtures("workers_here")
def test_every_mode_is_timed_in_every_round_and_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dataclasses.replace(OBSERVED, shapes=(SMALL,)).suite()
    result = run_small(small, tmp_path, monkeypatch, rounds=2)["shapes"][0]
    names = [mode.name for mode in (OBSERVED.plain, *OBSERVED.modes)]
    assert [sample["case"] for sample in result["samples"]] == names * 2
    assert all(sample["wall"] > 0 for sample in result["samples"])
    assert result["differing"] == []
    assert capsys.readouterr().out.count("equal") == len(OBSERVED.modes)
