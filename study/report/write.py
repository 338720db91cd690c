"""Write report.json, report.md and report.html, and render the terminal's summary."""

from __future__ import annotations

from pathlib import Path

from gpt2.system.files import write_json, write_text
from pages.document import render_markdown
from pages.document import render_terminal as render_document
from pages.page import render_html
from study.attention import data
from study.report.build import Report, as_json, build_report
from study.report.document import report_document, terminal_document


def write_report(study_dir: Path) -> Report:
    """Rebuild report.json, report.md and report.html from the records, each replaced at once."""
    report = build_report(study_dir)
    document = report_document(report, study_dir)
    write_json(study_dir / "report.json", as_json(report))
    write_text(study_dir / "report.md", render_markdown(document))
    write_text(study_dir / "report.html", render_html(document))
    return report


def render_terminal(report: Report) -> str:
    """The report in lines of at most 100 columns."""
    return render_document(terminal_document(report))


def is_current(study_dir: Path) -> bool:
    """Whether every part of the report exists and is newer than every record."""
    parts = ("report.json", "report.md", "report.html", data.FILE)
    try:
        written = min((study_dir / part).stat().st_mtime_ns for part in parts)
    except OSError:
        return False
    return all(path.stat().st_mtime_ns <= written for path in (study_dir / "runs").glob("*/run.json"))
