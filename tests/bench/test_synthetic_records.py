"""Synthetic records are valid, count as runs, and are marked as synthetic."""

from pathlib import Path

import pytest

from bench import synthetic_records
from bench.temporary_studies import configure_study
from gpt2.artifacts import run_record
from study.report import build
from tests.study.report.rendered import markdown


def test_synthetic_records_follow_the_schema_count_and_are_marked(tmp_path: Path) -> None:
    assert synthetic_records.write_runs(tmp_path, ("B", "RALEARN"), 3, 30) == 6
    built = build.build_report(tmp_path)
    assert [row.seeds for row in built.rows] == [[0, 1, 2], [0, 1, 2]]
    assert "RALEARN" in built.learned
    for run in built.runs:
        assert run.used
        assert run_record.load(tmp_path / "runs" / run.name).notes == (synthetic_records.NOTE,)
    assert synthetic_records.NOTE in markdown(built)


def test_a_study_is_configured_in_a_folder_and_the_users_config_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = configure_study(tmp_path / "place", "gpt2-ra-ablation-smoke", SEEDS="3")
    assert study.directory == tmp_path / "place" / "results" / "gpt2-ra-ablation-smoke"
    assert study.settings.seeds == 3
    assert not (tmp_path / ".config").exists()
