"""The evaluation suite: its items, and a run on a tiny model."""

from pathlib import Path

import pytest

from bench import suite
from bench.suites import evaluation
from tests.bench.sessions import run_small

TINY = evaluation.EvaluatedShape("tiny", 1, 1, 8, 64, micro=1, windows=2, items=3)


@pytest.mark.usefixtures("workers_here")
def test_the_suite_measures_prints_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "SHAPES", {"cpu": (TINY,)})
    found = run_small(evaluation.SUITE, tmp_path, monkeypatch, rounds=1, seconds=0)
    shown = capsys.readouterr().out
    assert "EXTRAPOLATED by tokens from 3 items to all 10,042" in shown
    assert (found["schema"], found["suite"]) == (suite.SCHEMA, "evaluation")
    assert {"created", "device", "dtype", "target", "environment"} <= set(found)
    assert [row["case"] for row in found["rows"]] == list(evaluation.CASES)
    assert [sample["case"] for sample in found["samples"]] == list(evaluation.CASES)
    for row, sample in zip(found["rows"], found["samples"], strict=True):
        assert row["hellaswag_seconds"]["low"] > 1000 * sample["hellaswag"] > 0  # 3 of 10,042 items
        assert row["validation_share"]["low"] > 0
