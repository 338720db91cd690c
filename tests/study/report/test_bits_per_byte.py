"""Bits per byte in report and comparison."""

import math
from pathlib import Path

import pytest

from gpt2 import tokenizer
from referee.pages.document import render_markdown, render_terminal
from study.compare.compare_page import comparison_document
from study.compare.compared_studies import build_comparison
from study.report.report_data import as_json, build_report
from study.report.report_page import report_document, terminal_document
from tests.study.sample_records import a_study, edit


def with_bytes(folder: Path, text_bytes: int, name: str) -> Path:
    """Return a study whose records have bits per byte, of the named tokenizer."""
    study = a_study(folder)
    for path in sorted((study / "runs").iterdir()):
        fingerprint = {"tokenizer": tokenizer.load(name).fingerprint}
        edit(study, path.name, validation={"bytes": text_bytes}, fingerprint=fingerprint)
    return study


def test_a_report_shows_bits_per_byte_and_the_unit_of_perplexity(tmp_path: Path) -> None:
    study = with_bytes(tmp_path / "study", 4000, "bytes")
    report = build_report(study)
    row = as_json(report)["rows"][0]
    assert row["bits_per_byte"]["mean"] == pytest.approx(
        row["final_loss"]["mean"] * 4096 / math.log(2) / 4000
    )
    expected = f"{row['bits_per_byte']['mean']:.3f}"
    for page in (
        render_markdown(report_document(report, study)),
        terminal := render_terminal(terminal_document(report)),
    ):
        assert expected in page
        assert "Perplexity is per byte;" in page
    assert max(map(len, terminal.splitlines())) <= 100


def test_two_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    paths = [with_bytes(tmp_path / name, count, name) for name, count in (("bytes", 4000), ("gpt2", 16000))]
    comparison = build_comparison(paths)
    assert not comparison.absolute
    page = render_markdown(comparison_document(comparison))
    assert "bytes: one byte, gpt2: one GPT-2 token" in page
    for study in comparison.studies:
        assert f"{as_json(study.report)['rows'][0]['bits_per_byte']['mean']:.3f}" in page
