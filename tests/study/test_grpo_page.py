"""The report of a GRPO study: an independent t test on accuracies, diverged runs in no mean, damage left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from scipy import stats

from referee.verdict.rows import ACCURACY, TEST, Row
from runtime import records, run_record
from study.compare.compare_page import write_comparison
from study.compare.compared_studies import build_comparison
from study.grpo_page import GrpoReport, build_report
from study.report.report_page import write_report
from tests.study.sample_records import STEPS, a_record

PROBLEMS = 1000
FINAL = {"B": (760, 764, 770), "B+AQN=mild": (761, 764, 771), "B+AQN=qerl": (700, 712, 708)}


def write_run(study: Path, arm: str, seed: int, right: int, error: str | None = None) -> Path:
    """Write a run with 240 right answers before training, and so many after it."""
    value = a_record(arm, seed, 4.0) | {"task": "grpo", "study": study.name, "validation": None}
    if error:
        value |= {"status": "failed", "error": error}
    folder = study / "runs" / value["run"]
    folder.mkdir(parents=True)
    row = Row(study.name, arm, seed, "qwen", "fp32", f"{TEST}@0", ACCURACY, 0, 0.24, PROBLEMS)
    last = row.replace(tokens=value["progress"]["tokens"], value=right / PROBLEMS)
    records.write_rows(folder, [row, last])
    (folder / "config").write_text("CONFIG_SEEDS=3\n")
    line = {"event": "train", "iteration": 1, "tokens": 128, "train_seconds": 1.0, "loss": 0.0}
    logp = {"logp_diff": 0.02 * seed, "logp_diff_absolute": 0.03}
    (folder / "metrics.jsonl").write_text(json.dumps(line | logp) + "\n")
    run_record.write(folder, run_record.from_json(value))
    return folder


def write_study(study: Path, final: Mapping[str, tuple[int, ...]] = FINAL) -> Path:
    for arm, counts in final.items():
        for seed, right in enumerate(counts):
            write_run(study, arm, seed, right)
    return study


def words(report: GrpoReport) -> dict[str, str | None]:
    return {one.arm: one.verdict.word if one.verdict else None for one in report.arms}


def test_verdicts_are_those_of_a_paired_t_test_with_holms_method(tmp_path: Path) -> None:
    report = build_report(write_study(tmp_path / "study"))
    verdict = report.arms[2].verdict
    assert verdict
    reference = stats.ttest_rel([0.700, 0.712, 0.708], [0.760, 0.764, 0.770])
    assert verdict.test.p_value == pytest.approx(reference.pvalue)
    assert verdict.adjusted_p == pytest.approx(2 * reference.pvalue)
    assert verdict.test.difference.mean == pytest.approx((0.700 + 0.712 + 0.708 - 0.760 - 0.764 - 0.770) / 3)
    assert words(report) == {"B": None, "B+AQN=mild": "equivalent", "B+AQN=qerl": "worse"}
    assert report.arms[0].shown(STEPS, report.problems) == "76.47 ± 1.34"


def test_a_higher_accuracy_is_better(tmp_path: Path) -> None:
    report = build_report(
        write_study(tmp_path / "study", {"B": FINAL["B+AQN=qerl"], "B+AQN=mild": FINAL["B"]})
    )
    assert words(report)["B+AQN=mild"] == "better"


@pytest.mark.parametrize("arm", ["B", "B+AQN=mild"])
def test_an_arm_with_a_diverged_run_is_not_judged(arm: str, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    write_run(study, arm, 3, 0, error="DivergedError: step 7: the loss is nan")
    report = build_report(study)
    assert words(report)["B+AQN=mild"] is None
    diverged = next(one for one in report.arms if one.arm == arm)
    assert list(diverged.diverged.values()) == ["DivergedError: step 7: the loss is nan"]
    assert sorted(diverged.accuracies[STEPS]) == [0, 1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "rows.jsonl", "run.json"])
def test_a_run_with_an_altered_file_is_left_out_and_named(name: str, tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    path = study / "runs/B+AQN=qerl.2" / name
    path.write_text(path.read_text().replace("0", "1", 1))
    report = write_report(study)
    assert [run.name for run in report.uncounted] == ["B+AQN=qerl.2"]
    assert "B+AQN=qerl.2 does not count" in (study / "report.html").read_text()


def test_studies_are_compared_by_accuracy(tmp_path: Path) -> None:
    other = {arm: tuple(count + 50 for count in counts) for arm, counts in FINAL.items()}
    studies = [write_study(tmp_path / "a"), write_study(tmp_path / "b", other)]
    comparison = build_comparison(studies)
    assert [row.differences[0].mean for row in comparison.absolute] == pytest.approx([0.05] * 3)
    markdown = write_comparison(comparison, tmp_path / "out")[1].read_text()
    assert "worse, -5.80" in markdown
    assert "76.47 %" in markdown
