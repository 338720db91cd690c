"""Values and paired differences of arms against formulas written out here, and which results are compared."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from referee.verdict.rows import Row
from runtime import run_record
from study.evaluation.lm_eval_page import (
    NO_VERDICT,
    TRUNCATED,
    Result,
    compare_arms,
    folder_of,
)
from study.report import report_page as write
from study.verify import verify_study
from tests.study.sample_records import a_study

LIKELIHOODS = [-2.5, -4.0, -1.25, -3.0]


def accuracy(arm: str, seed: int, right: str, digest: str = "q") -> Result:
    items = np.array([float(one) for one in right])
    return Result(a_row(arm, seed, "acc", items.mean(), digest), items)


def perplexity(arm: str, items: list[float]) -> Result:
    return Result(a_row(arm, 0, "perplexity", math.exp(-np.mean(items))), np.array(items))


def a_row(arm: str, seed: int, metric: str, value: float, digest: str = "q") -> Row:
    return Row("s", arm, seed, "tiny", "fp32", f"piqa@{digest}", metric, 1, value, 4)


bits = st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=4, max_size=4)


@given(bits)
def test_differences_of_accuracies_are_paired_over_items_and_over_seeds(answers: list[list[bool]]) -> None:
    rows = ["".join("01"[bit] for bit in row) for row in answers]
    found = compare_arms([
        accuracy("RALEARN", 0, rows[0]), accuracy("B", 0, rows[1]), accuracy("RALEARN", 1, rows[2]),
        accuracy("B", 1, rows[3]), accuracy("RALEARN", 2, rows[2]),
    ])  # fmt: skip
    (difference,) = found.differences
    matrix = np.array(answers, dtype=float)
    gaps = np.stack([matrix[0] - matrix[1], matrix[2] - matrix[3]])
    assert (difference.arm, difference.baseline, difference.seeds) == ("RALEARN", "B", [0, 1])
    assert difference.value == pytest.approx(gaps.mean())
    assert difference.stderr_items == pytest.approx(stats.sem(gaps.mean(axis=0)))
    assert difference.stderr_seeds == pytest.approx(stats.sem(gaps.mean(axis=1)))
    value = next(one for one in found.values if one.arm == "B")
    assert value.value == pytest.approx(matrix[[1, 3]].mean())
    assert value.stderr_items == pytest.approx(stats.sem(matrix[[1, 3]].mean(axis=0)))


def test_the_value_of_one_seed_has_the_error_of_the_harness() -> None:
    (value,) = compare_arms([accuracy("B", 0, "0111")]).values
    assert (value.value, value.stderr_items) == (0.75, pytest.approx(math.sqrt(0.75 * 0.25 / 3)))


def test_perplexities_are_compared_by_their_logarithms() -> None:
    other = [item - 0.5 for item in LIKELIHOODS[:3]] + [LIKELIHOODS[3] + 1.0]
    runs = perplexity("B", LIKELIHOODS), perplexity("RAALL", other)
    found = compare_arms(runs)
    (difference,) = found.differences
    ratio = runs[1].row.value / runs[0].row.value
    assert difference.value == pytest.approx(math.log(ratio))
    assert difference.stderr_items == pytest.approx(stats.sem([0.5, 0.5, 0.5, -1.0]))
    assert difference.stderr_seeds is None


def test_a_value_that_does_not_follow_from_its_items_is_shown_and_not_paired() -> None:
    odd = [Result(a_row(arm, 0, "f1", 0.9), np.array([0.1, 0.2])) for arm in ("B", "RAALL")]
    found = compare_arms(odd)
    assert [value.value for value in found.values] == [0.9, 0.9]
    assert found.differences == []


def test_results_on_other_items_or_of_another_version_are_left_out_and_named() -> None:
    found = compare_arms([
        accuracy("B", 0, "0101"), accuracy("RALEARN", 0, "0111"), accuracy("RALEARN", 1, "0111", digest="x"),
        accuracy("B", 1, "0111"),
    ])  # fmt: skip
    assert [one.seeds for one in found.differences] == [[0]]
    (note,) = found.notes
    assert "RALEARN1" in note


def write_results(
    study: Path, variants: tuple[str, ...] = ("B", "RALEARN"), seeds: int = 3, ends: int = 0
) -> None:
    """Evaluate runs on a task. ends: tokens before the last weights."""
    for seed in range(seeds):
        for number, variant in enumerate(variants):
            folder = study / "runs" / run_record.run_name(variant, seed)
            record = run_record.load(folder)
            row = run_record.read_rows(folder, record)[-1].replace(data="piqa@q")
            row = row.replace(tokens=row.tokens - ends, metric="acc")
            right = [(item + seed + number) % 3 > 0 for item in range(40)]
            scored = [
                (row.replace(value=sum(right) / 40), right),
                (row.replace(metric=TRUNCATED, value=0.0), None),
            ]
            run_record.write_evaluation(folder_of(folder, "piqa"), record, scored, {"harness": "0.4.13"})


def test_a_report_shows_the_results_of_its_counted_runs(tmp_path: Path) -> None:
    study = a_study(tmp_path / "study")
    report = write.write_report(study)
    assert "Downstream tasks" not in (study / "report.html").read_text()
    assert "downstream" not in (study / "report.json").read_text()
    write_results(study)
    write.write_report(study)
    page, text = (study / "report.html").read_text(), (study / "report.md").read_text()
    assert "Downstream tasks" in page
    for words in (
        "## Downstream tasks",
        NO_VERDICT[:60],
        "Not evaluated: RAEARLY0",
        "| RALEARN | piqa | acc |",
    ):
        assert words in text, words
    assert '"downstream"' in (study / "report.json").read_text()
    assert len(report.used) > 6


def test_results_of_other_weights_are_not_shown(tmp_path: Path) -> None:
    study = a_study(tmp_path / "study")
    write_results(study, ends=1)
    write.write_report(study)
    assert "Downstream tasks" not in (study / "report.md").read_text()


def test_an_altered_file_is_named_by_verify_and_not_shown(tmp_path: Path) -> None:
    study = a_study(tmp_path / "study")
    write_results(study, ("B",), 1)
    folder = folder_of(study / "runs/B0", "piqa")
    record = run_record.load(study / "runs/B0")
    assert run_record.read_evaluation(folder, record)
    path = folder / "rows.jsonl"
    path.write_text(path.read_text().replace('"acc"', '"acd"'))
    assert run_record.read_evaluation(folder, record) is None
    problems = [problem for row in verify_study(study) for problem in row.problems]
    assert any(problem.startswith("evaluations/lm-eval-piqa: rows.jsonl: SHA-256 is") for problem in problems)
