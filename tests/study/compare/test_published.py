import math
from pathlib import Path

import pytest

from study.compare import build as compare
from study.compare import write
from study.report.write import render_terminal, write_report
from tests.study.compared import markdown, published, terminal


def test_the_published_study_is_refused_for_its_batch_and_its_schedule(tmp_path: Path) -> None:
    comparison = compare.build_comparison(published(tmp_path))
    assert comparison.absolute == []
    fatal = {check.subject: check.values for check in comparison.checks if check.status == "fatal"}
    assert fatal == {
        "effective batch": ("512", "256"),
        "schedule": ("201 of 10,000 iterations", "601 of 10,000 iterations"),
    }
    text = markdown(comparison)
    above = text.index("Losses must not be compared between these studies: ")
    assert "effective batch (512" in text[above : text.index("\n|", above)]  # the reason is above the table
    for text in (markdown(comparison), terminal(comparison)):
        words = " ".join(text.split())
        assert "must not be compared between these studies" in words
        assert "effective batch (512 " in words
        assert "schedule (201 of 10,000 iterations" in words


def test_the_published_gains_are_shown_against_their_baseline_and_marked_as_no_evidence(
    tmp_path: Path,
) -> None:
    comparison = compare.build_comparison(published(tmp_path))
    text = markdown(comparison)
    assert "B, RAEARLY, RALATE and RAALL are control arms (A/A): one function" in text
    assert text.count("the schedule was cut in 4 of 4 runs: ") == 2
    changes = {
        row.variant: [math.exp(i.mean) - 1 for i in row.against_baseline if i] for row in comparison.relative
    }
    assert changes["RALATE"] == pytest.approx([880.12 / 964.50 - 1, 316.04 / 335.94 - 1])
    assert text.count("one seed: not evidence") == 6
    assert [ranking.places for ranking in comparison.rankings] == [[], []]
    assert text.count("one seed: no ranking") >= 2
    assert "observed place" not in text


@pytest.mark.parametrize("name", ["A100", "W7900"])
def test_the_report_on_a_published_table_has_no_verdict_and_is_marked_as_no_evidence(
    tmp_path: Path, name: str
) -> None:
    folder = next(folder for folder in published(tmp_path) if folder.name == name)
    report = write_report(folder)
    output = "one seed, control arms, differences are not evidence"
    texts = [(folder / f"report.{kind}").read_text() for kind in ("md", "html")]
    for text in (*texts, render_terminal(report)):
        words = " ".join(text.split())
        assert words.count(output) == 1
        assert "needed seeds" not in words


def test_the_comparison_of_published_tables_marks_each_as_no_evidence(tmp_path: Path) -> None:
    write.write_comparison(compare.build_comparison(published(tmp_path)), tmp_path / "out")
    output = "one seed, control arms, differences are not evidence"
    for kind, bold in (("md", "**{}**"), ("html", "<strong>{}</strong>")):
        text = (tmp_path / "out" / f"compare.{kind}").read_text()
        assert text.count(output) == 2
        assert all(f"{bold.format(name)}: {output}." in text for name in ("A100", "W7900"))
        assert "against its study's control arms" not in text
        assert "than standard attention" not in text
