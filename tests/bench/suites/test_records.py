"""The suite of recorded runs: its parts, its size option, and its table."""

import json
from pathlib import Path

import pytest

from bench.suites import records
from bench.workers import BenchError
from gpt2.system.errors import UserError
from tests.bench.sessions import run_small


def test_planning_and_reporting_are_timed_by_part(tmp_path: Path) -> None:
    found = records.measure(str(tmp_path), 2, 20)
    assert (found["runs"], found["used"]) == (10, 5)
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert (tmp_path / "results/gpt2-ra-ablation-smoke/report.html").exists()
    shown = str(records.table(json.loads(json.dumps(found))))
    assert "10 synthetic records" in shown
    assert "planning and reporting:" in shown


def test_the_sizes_come_from_the_option_and_the_worker_measures_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_small(records.SUITE, tmp_path, monkeypatch, shape="5x20")
    assert (result["runs"], result["lines_a_run"]) == (5, 20)
    assert result["complete"] is True


@pytest.mark.parametrize("shape", ["many", "10x", "-5"])
def test_a_size_that_is_no_number_is_refused(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is no number of runs; fix: SHAPE=1000 or SHAPE=1000x500"):
        run_small(records.SUITE, tmp_path, monkeypatch, shape=shape)


def test_a_report_command_that_fails_gives_its_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="make report failed: error: "):
        records.run_report_command(tmp_path / "none")
