"""The suite of recorded runs: its records, its parts, its size option, and its table."""

from pathlib import Path

import pytest

from bench.suites import records
from gpt2.artifacts import run_record
from gpt2.system.errors import UserError
from study.report import build
from tests.bench.sessions import run_small
from tests.study.report.rendered import markdown


def test_synthetic_records_follow_the_schema_count_and_are_marked(tmp_path: Path) -> None:
    records.write_runs(tmp_path, ("B", "RALEARN"), 3, 30)
    built = build.build_report(tmp_path)
    assert [row.seeds for row in built.rows] == [[0, 1, 2], [0, 1, 2]]
    assert "RALEARN" in built.learned
    for run in built.runs:
        assert run.used
        assert run_record.load(tmp_path / "runs" / run.name).notes == (records.NOTE,)
    assert records.NOTE in markdown(built)


def test_the_next_run_is_reached_and_the_report_is_written(tmp_path: Path) -> None:
    study_dir, seconds = records.seconds_to_next_run(tmp_path, 2, 20)
    assert seconds > 0
    assert len([*study_dir.glob("runs/*/run.json")]) == 10
    records.report(study_dir)
    assert [row.variant for row in build.build_report(study_dir).rows] == list(records.VARIANTS)
    assert (study_dir / "report.html").exists()


def test_the_sizes_come_from_the_option_and_workers_measure_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_small(records.SUITE, tmp_path, monkeypatch, shape="5x20")
    assert (result["runs"], result["lines_a_run"]) == (5, 20)
    assert all(seconds > 0 for seconds in result["seconds"].values())
    assert result["complete"] is True
    shown = capsys.readouterr().out
    assert "5 synthetic records" in shown
    assert f"planning and reporting: {sum(result['seconds'].values()):.2f} s" in shown


@pytest.mark.parametrize("shape", ["many", "10x", "-5"])
def test_a_size_that_is_no_number_is_refused(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is no number of runs; fix: SHAPE=1000 or SHAPE=1000x500"):
        run_small(records.SUITE, tmp_path, monkeypatch, shape=shape)
