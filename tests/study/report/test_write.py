"""What a report names, and how long its page refreshes itself."""

from pathlib import Path

from study.report import report_page as write
from tests.checked_files import write_checked, write_right
from tests.study.report import rendered
from tests.study.sample_records import a_study, edit


def test_the_page_refreshes_itself_only_while_runs_are_unfinished(tmp_path: Path) -> None:
    a_study(tmp_path, seeds=1, variants=("B", "RAALL"))
    refresh = 'http-equiv="refresh"'
    write_checked(tmp_path / "expected.json", {"variants": ["B", "RAALL"], "seeds": 2})
    assert refresh in rendered.page(tmp_path)
    write_checked(tmp_path / "expected.json", {"variants": ["B", "RAALL"], "seeds": 1})
    assert refresh not in rendered.page(tmp_path)


def test_files_that_a_part_of_the_report_needs_are_named_where_they_are_missing_or_damaged(
    tmp_path: Path,
) -> None:
    a_study(tmp_path, seeds=1, variants=("B", "RAALL"))
    for folder in tmp_path.glob("runs/*"):
        write_right(folder, "hellaswag", [True] * 30 + [False] * 70)
        edit(tmp_path, folder.name, hellaswag={"items": 100})
    assert not [note for note in write.write_report(tmp_path).notes if ".json" in note]
    write_checked(tmp_path / "expected.json", {"variants": ["B"], "seeds": 3000000})
    (tmp_path / "plan.json").write_text("[" * 100_000)
    (tmp_path / "runs/B0/metrics.jsonl").unlink()
    (tmp_path / "runs/RAALL0/items/acc-hellaswag.npy").unlink()
    page = [write.write_report(tmp_path), (tmp_path / "report.html").read_text()][1]
    for note in (
        "Expected `int` &lt;= 1000",
        "plan.json cannot be read: nested too deeply",
        "metrics.jsonl: SHA-256 is missing",
        "items/acc-hellaswag.npy: SHA-256 is missing",
    ):
        assert note in page


def test_a_study_scored_on_one_hellaswag_item_has_a_page(tmp_path: Path) -> None:
    a_study(tmp_path, seeds=1, variants=("B", "RAALL"))
    for folder in tmp_path.glob("runs/*"):
        edit(tmp_path, folder.name, hellaswag={"acc": 1.0, "acc_norm": 0.0, "items": 1})
    write.write_report(tmp_path)
    assert "100.0 ± 50.0 %" in (tmp_path / "report.md").read_text()
