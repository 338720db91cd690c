"""HellaSwag scores count together only where they were taken on the same items; nothing else is averaged or paired."""

from pathlib import Path
from typing import Any

import pytest

from runtime import run_record
from runtime.errors import UserError
from study.hellaswag_scores import HELLASWAG, common_items
from study.preconditions import refuse_other_items
from study.report import report_data as build
from study.runs import Run
from tests.study.analysis.test_paired_tests import a_study as a_study_by_item
from tests.study.report import rendered
from tests.study.sample_records import a_record, a_run, a_study, edit

ONE, OTHER = "1" * 64, "2" * 64


def a_score(sha256: str | None, items: int = 400, acc: float = 0.4) -> dict[str, Any]:
    score = {"acc": acc, "acc_stderr": 0.02, "acc_norm": acc, "acc_norm_stderr": 0.02, "items": items}
    return score | ({} if sha256 is None else {"items_sha256": sha256})


def a_scored_study(folder: Path, digests: dict[str, str], seeds: int = 3) -> Path:
    """Every run scored 0.4 on ONE, those of `digests` 0.9 on the items of that digest."""
    study = a_study(folder, seeds=seeds, variants=("B", "RAALL"))
    for path in (study / "runs").iterdir():
        digest = digests.get(path.name, ONE)
        edit(study, path.name, hellaswag=a_score(digest, acc=0.4 if digest == ONE else 0.9))
    return study


def test_scores_on_other_items_are_named_and_excluded_from_the_mean(tmp_path: Path) -> None:
    report = build.build_report(a_scored_study(tmp_path, {"RAALL1": OTHER}))
    row = next(row for row in report.rows if row.variant == "RAALL")
    assert (row.hellaswag.acc, row.hellaswag.runs, row.hellaswag.items) == (pytest.approx(0.4), 2, 400)
    assert "leaves out RAALL1" in rendered.markdown(report)


def test_variants_on_different_items_are_never_compared(tmp_path: Path) -> None:
    report = build.build_report(a_scored_study(tmp_path, {f"RAALL{seed}": OTHER for seed in range(3)}))
    found = {row.variant: row.hellaswag for row in report.rows}
    assert found["B"].acc == pytest.approx(0.4)
    assert found["RAALL"].acc is None


def scored(score: dict[str, Any] | None) -> Run:
    return a_run(a_record("B", 0, 4.0) | {"hellaswag": score})


def test_the_items_of_most_runs_count_and_ties_go_to_the_first() -> None:
    runs = [scored(a_score(digest)) for digest in (OTHER, ONE, ONE, OTHER)]
    assert common_items(runs[:3], HELLASWAG) == f"hellaswag@{ONE[:12]}"
    assert common_items(runs, HELLASWAG) == f"hellaswag@{OTHER[:12]}"
    assert common_items([scored(None), scored({"absent": "no network"})], HELLASWAG) is None


def test_only_equal_items_are_paired(tmp_path: Path) -> None:
    """As many on either side: by their number alone they would be taken for the same."""
    study = a_study_by_item(tmp_path)
    for path in (study / "runs").iterdir():
        score = run_record.load(path).to_json()["hellaswag"]
        other = path.name in ("RALEARN1", "RAALL0", "RAALL1", "RAALL2")
        edit(study, path.name, hellaswag=score | {"items_sha256": OTHER if other else ONE})
    tests = {test.variant: test for test in build.build_report(study).items if test.measure == "acc"}
    assert tests["RALEARN"].seeds == [0, 2]
    assert tests["RAEARLY"].seeds == [0, 1, 2]
    assert "RAALL" not in tests


def test_a_study_is_not_continued_on_other_items(tmp_path: Path) -> None:
    study, source = a_scored_study(tmp_path, {}, seeds=1), Path("items.jsonl")
    refuse_other_items(study, source, 400, ONE)
    with pytest.raises(UserError, match=f"400 items .SHA-256 {OTHER[:12]}.*fix: "):
        refuse_other_items(study, source, 400, OTHER)
