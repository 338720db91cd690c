"""The forms of a report, from its numbers alone."""

from pathlib import Path

from pages.document import render_markdown
from study.report.build import Report
from study.report.document import report_document
from study.report.write import render_terminal

NO_CURVES = Path("no-such-study")  # training curves and attention are files of the study


def markdown(report: Report) -> str:
    """report.md."""
    return render_markdown(report_document(report, NO_CURVES))


def terminal(report: Report) -> str:
    """The text that `make report` prints."""
    return render_terminal(report)
