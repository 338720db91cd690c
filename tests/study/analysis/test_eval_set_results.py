"""Held-out texts in report and comparison, against means computed from the records."""

import json
import math
import statistics
from pathlib import Path

import pytest
from scipy import stats

from referee.pages.document import render_markdown
from runtime.run_record import EvalSetEntry
from study.analysis.eval_set_results import eval_set_tables
from study.compare.compare_page import comparison_document
from study.compare.compared_studies import build_comparison
from study.report.report_data import as_json, build_report
from study.report.report_page import report_document
from tests.study.sample_records import VARIANTS, a_study, edit

TOKENS, WORDS, BYTES = 600, 200, 1200


def an_entry(loss: float, text: str = "t", tokens: str = "k") -> EvalSetEntry:
    nats = loss * TOKENS
    return EvalSetEntry(3, TOKENS, WORDS, BYTES, loss, math.exp(loss), math.exp(nats / WORDS), math.exp(nats / BYTES),
                        nats / BYTES / math.log(2), text * 64, tokens * 64)  # fmt: skip


def loss_of(name: str, seed: int) -> float:
    return (
        2.0
        + 0.05 * seed
        + {"RALEARN": -0.03, "RALATE": 0.004}.get(name, 0.0)
        + 0.001 * ((7 * seed + len(name)) % 5)
    )


def with_text(study: Path, name: str = "news", **digests: str) -> Path:
    for run_dir in sorted((study / "runs").iterdir()):
        value = json.loads((run_dir / "run.json").read_text())
        entry = an_entry(loss_of(value["variant"], value["seed"]), **digests)
        edit(study, run_dir.name, eval_sets={name: entry.to_json()})
    return study


def page_of(study: Path) -> str:
    return render_markdown(report_document(build_report(study), study))


def test_means_and_paired_differences_are_those_of_the_records(tmp_path: Path) -> None:
    study = with_text(a_study(tmp_path / "study", seeds=4))
    report = build_report(study)
    (table,) = report.eval_sets.tables
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
    assert as_json(report)["eval_sets"]["tables"][0]["rows"][-1]["variant"] == "RALEARN"


def test_a_run_on_another_text_is_left_out_of_that_text_and_of_nothing_else(tmp_path: Path) -> None:
    study = with_text(a_study(tmp_path / "study"))
    before = build_report(study)
    edit(study, "RALEARN1", eval_sets={"news": an_entry(9.0, "u", "v").to_json()})
    report = build_report(study)
    (table,) = report.eval_sets.tables
    assert table.left_out == ["RALEARN1"]
    row = next(row for row in table.rows if row.variant == "RALEARN")
    assert (row.runs, row.of, row.loss.count) == (2, 3, 2)
    assert row.loss.mean == pytest.approx(statistics.fmean(loss_of("RALEARN", seed) for seed in (0, 2)))
    assert report.verdicts == before.verdicts
    assert "evaluated on another text of this name: RALEARN1; fix: " in page_of(study)


def test_a_text_without_a_finite_loss_has_no_row(tmp_path: Path) -> None:
    study = with_text(a_study(tmp_path / "study", seeds=1))
    nothing = dict.fromkeys(("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"))
    edit(study, "RALEARN0", eval_sets={"news": an_entry(2.0).to_json() | nothing})
    (table,) = eval_set_tables(build_report(study).used).tables
    assert [row.variant for row in table.rows] == list(VARIANTS[:-1])


def test_two_studies_are_shown_side_by_side_and_different_texts_are_named(tmp_path: Path) -> None:
    one, same, tokens, other = (a_study(tmp_path / name) for name in ("one", "same", "tokens", "other"))
    for study, digests in (
        (one, {}),
        (same, {}),
        (tokens, {"tokens": "x"}),
        (other, {"text": "y", "tokens": "z"}),
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
