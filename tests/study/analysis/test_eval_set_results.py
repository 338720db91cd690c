"""Held-out texts in report and comparison, against means computed from the records."""

import math
import statistics
from pathlib import Path

import pytest
from scipy import stats

from referee.pages.document import render_markdown
from runtime import records, run_record
from study.analysis.eval_set_results import eval_set_tables
from study.compare.compare_page import comparison_document
from study.compare.compared_studies import build_comparison
from study.report.report_data import as_json, build_report
from study.report.report_page import report_document
from tests.study.sample_records import VARIANTS, a_study

TOKENS, WORDS, BYTES = 600, 200, 1200


def set_text(folder: Path, loss: float, digest: str = "t", tokens: int = TOKENS) -> None:
    """Replace the rows of the text in a finished run."""
    record = run_record.load(folder)
    rows = records.read_rows(folder, (record.study, record.variant, record.seed))
    values = {"loss": loss, "documents": 3, "tokens": tokens, "words": WORDS, "bytes": BYTES}
    text = rows[0].replace(data=f"news@{digest * 12}", tokens=record.progress.tokens)
    added = [text.replace(metric=metric, value=value) for metric, value in values.items()]
    records.write_rows(folder, [*(row for row in rows if row.dataset != "news"), *added])
    run_record.write(folder, record)


def loss_of(name: str, seed: int) -> float:
    return (
        2.0
        + 0.05 * seed
        + {"RALEARN": -0.03, "RALATE": 0.004}.get(name, 0.0)
        + 0.001 * ((7 * seed + len(name)) % 5)
    )


def with_text(study: Path, digest: str = "t", tokens: int = TOKENS) -> Path:
    for run_dir in sorted((study / "runs").iterdir()):
        record = run_record.load(run_dir)
        set_text(run_dir, loss_of(record.variant, record.seed), digest, tokens)
    return study


def page_of(study: Path) -> str:
    return render_markdown(report_document(build_report(study), study))


def test_means_and_paired_differences_are_those_of_the_records(tmp_path: Path) -> None:
    study = with_text(a_study(tmp_path / "study", seeds=4))
    report = build_report(study)
    (table,) = report.eval_sets
    assert (table.name, table.tokens, table.words, table.bytes, table.left_out) == (
        "news",
        TOKENS,
        WORDS,
        BYTES,
        [],
    )
    rows = {row.variant: row for row in table.rows}
    assert list(rows) == list(VARIANTS)
    assert all((row.against_controls is None) == row.control for row in table.rows)
    differences = []
    for seed in range(4):
        controls = {loss_of(name, seed) for name in VARIANTS if name != "RALEARN"}  # equal arms count once
        differences.append(loss_of("RALEARN", seed) - statistics.fmean(controls))
    expected = statistics.fmean(differences)
    half = stats.t.ppf(0.975, 3) * statistics.stdev(differences) / 2
    found = rows["RALEARN"].against_controls
    assert (found.mean, found.low, found.high) == pytest.approx((expected, expected - half, expected + half))
    mean = statistics.fmean(loss_of("RALEARN", seed) for seed in range(4))
    page = page_of(study)
    section = page.partition("## Held-out texts")[2].partition("\n## ")[0]
    assert "no verdict uses this section" in section
    assert f"{math.exp(mean * TOKENS / WORDS):.2f}" in section
    assert f"{math.exp(mean):.2f}" in section
    assert f"{mean * TOKENS / BYTES / math.log(2):.3f}" in section
    assert f"{100 * math.expm1(expected):+.2f} %" in section
    assert as_json(report)["eval_sets"][0]["rows"][-1]["variant"] == "RALEARN"


def test_a_run_on_another_text_is_left_out_of_that_text_and_of_nothing_else(tmp_path: Path) -> None:
    study = with_text(a_study(tmp_path / "study"))
    before = build_report(study)
    set_text(study / "runs/RALEARN1", 9.0, "u")
    report = build_report(study)
    (table,) = report.eval_sets
    assert table.left_out == ["RALEARN1"]
    row = next(row for row in table.rows if row.variant == "RALEARN")
    assert (row.runs, row.of, row.loss.count) == (2, 3, 2)
    assert row.loss.mean == pytest.approx(statistics.fmean(loss_of("RALEARN", seed) for seed in (0, 2)))
    assert report.verdicts == before.verdicts
    assert "evaluated on another text of this name: RALEARN1; fix: " in page_of(study)


def test_a_text_without_a_finite_loss_has_no_row(tmp_path: Path) -> None:
    study = with_text(a_study(tmp_path / "study", seeds=1))
    set_text(study / "runs/RALEARN0", math.nan)
    (table,) = eval_set_tables(build_report(study).used)
    assert [row.variant for row in table.rows] == list(VARIANTS[:-1])


def test_two_studies_are_shown_side_by_side_and_different_texts_are_named(tmp_path: Path) -> None:
    one, same, tokens, other = (a_study(tmp_path / name) for name in ("one", "same", "tokens", "other"))
    for study, digests in (
        (one, {}),
        (same, {}),
        (tokens, {"tokens": 700}),
        (other, {"digest": "y"}),
    ):
        with_text(study, **digests)
    expected = {
        same: "One text. ",
        tokens: "The tokens differ: compare the perplexity per word",
        other: "do not compare them",
    }
    for study, sentence in expected.items():
        page = render_markdown(comparison_document(build_comparison([one, study])))
        section = page.partition("## Held-out texts")[2].partition("\n## ")[0]
        assert sentence in section
        assert f"word perplexity, one | word perplexity, {study.name}" in section
        assert "RALEARN" in section
        assert f"bits per byte, {study.name}" in section
    assert "Held-out" not in render_markdown(
        comparison_document(build_comparison([a_study(tmp_path / "a"), a_study(tmp_path / "b")]))
    )
