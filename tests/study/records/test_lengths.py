"""A report of a study whose runs are being extended: one length, complete seeds, and a sentence on the others."""

import json
from pathlib import Path

import pytest

from gpt2.system import files
from study.attention.data import FILE
from study.records.lengths import saved_counts, saved_name, shown_length
from study.report.build import build_report
from study.report.sentences import uncounted
from study.report.write import write_report
from tests.study.sample_records import STEPS, a_plan, a_record, a_study, edit

VARIANTS = ("B", "RAALL", "RALEARN")
LONG = 2 * STEPS


def plan_of(count: int) -> dict[str, object]:
    content = a_plan(count, notes=[f"planned {count}"])
    content["budget"]["max_iterations"] = count
    return content


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A study of eight finished seeds right after `make extend FACTOR=2`."""
    study = a_study(tmp_path / "study", seeds=8, variants=VARIANTS)
    files.write_json(study / f"plan-{STEPS}.json", plan_of(STEPS))
    files.write_json(study / "plan.json", plan_of(LONG))
    for folder in (study / "runs").iterdir():
        (folder / "run.json").rename(folder / f"run-{STEPS}.json")
        (folder / "metrics.jsonl").rename(folder / f"metrics-{STEPS}.jsonl")
        record = json.loads((folder / f"run-{STEPS}.json").read_text())
        files.write_json(folder / "run.json", record | {"status": "interrupted"})
    return study


def finish(study: Path, seeds: int, names: tuple[str, ...] = VARIANTS) -> None:
    """Let these runs finish the longer length."""
    for seed in range(seeds):
        for name in names:
            record = a_record(name, seed, 3.5, LONG)
            record["fingerprint"]["schedule"] = "longer"
            files.write_json(study / "runs" / record["run"] / "run.json", record)


def lengths(study: Path) -> list[int]:
    """Iterations of the runs that count in the report."""
    return [run.record.progress.iterations for run in build_report(study).runs if run.used]


@pytest.mark.parametrize("seeds", range(9))
def test_a_report_shows_one_length_and_the_longer_one_from_three_complete_seeds_on(
    extended: Path, seeds: int
) -> None:
    finish(extended, seeds)
    finish(extended, min(8, seeds + 1), ("B",))  # the next seed is not complete
    report = build_report(extended)
    longer = seeds >= 3
    assert set(lengths(extended)) == {LONG if longer else STEPS}
    assert len(lengths(extended)) == (3 * seeds + (seeds < 8) if longer else 24)
    assert report.budget is not None
    assert report.budget.max_iterations == (LONG if longer else STEPS)
    notes = [note for note in report.notes if "have finished the extension" in note]
    assert len(notes) == (seeds < 8)
    assert all(
        f"{seeds} of 8 seeds have finished the extension from 300 to 600 iterations" in note for note in notes
    )


def test_a_study_of_one_seed_shows_its_shorter_runs_until_the_seed_is_complete(tmp_path: Path) -> None:
    study = a_study(tmp_path / "study", seeds=1, variants=("B",))
    files.write_json(study / f"plan-{STEPS}.json", plan_of(STEPS))
    files.write_json(study / "plan.json", plan_of(LONG))
    assert lengths(study) == [STEPS]  # the extension was interrupted before B0
    assert "when 1 seed has finished" in shown_length(study).note
    for name in ("run.json", "metrics.jsonl"):
        path = study / "runs" / "B0" / name
        path.rename(saved_name(path, STEPS))
    finish(study, 1, ("B",))
    assert lengths(study) == [LONG]
    assert shown_length(study).note == ""


def test_a_run_of_another_length_is_named_and_excluded(extended: Path) -> None:
    finish(extended, 1)
    (extended / "runs" / "B0" / f"run-{STEPS}.json").unlink()
    report = build_report(extended)
    run = next(run for run in report.runs if run.name == "B0")
    assert (run.used, run.why_not) == (False, "it has 600 iterations, and this report shows runs of 300")
    assert "B0 (other length)" in uncounted(report)


def test_the_figures_are_those_of_the_length_shown(extended: Path) -> None:
    before = write_report(extended)
    page = (extended / "report.html").read_text()
    assert "Training loss" in page
    for path in extended.glob(f"runs/*/metrics-{STEPS}.jsonl"):
        path.unlink()
    assert write_report(extended).rows == before.rows
    assert len((extended / "report.html").read_text()) < len(page)


def test_a_study_without_an_extension_is_read_unchanged(tmp_path: Path) -> None:
    study = a_study(tmp_path / "study", seeds=1, variants=("B",))
    assert shown_length(study).length is None
    (study / "plan.json").write_text("{")
    (study / "plan-x.json").write_text("{}")
    assert saved_counts(study, "plan") == []
    assert shown_length(study).length is None
    edit(study, "B0", status="interrupted")
    assert lengths(study) == []
    assert not (study / FILE).exists()
