"""The forms of a report, and the outline of its page."""

from html.parser import HTMLParser
from pathlib import Path

from referee.pages.document import render_markdown
from study.report import report_page as write
from study.report.report_data import Report
from study.report.report_page import render_terminal, report_document

NO_CURVES = Path("no-such-study")  # training curves and attention are files of the study
VOID = {"meta", "br", "input", "link", "img", "hr"}


def markdown(report: Report) -> str:
    """report.md."""
    return render_markdown(report_document(report, NO_CURVES))


def terminal(report: Report) -> str:
    """The text that `make report` prints."""
    return render_terminal(report)


class Outline(HTMLParser):
    """Check that elements are closed and ids unique, and collect external addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name == "src" or (name == "href" and tag != "a"):
                self.loads.append(str(value))
            if name == "href" and tag == "a":
                self.links.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(text: str) -> Outline:
    built = Outline()
    built.feed(text)
    assert built.open == []
    assert len(set(built.ids)) == len(built.ids)
    return built


def page(study: Path) -> str:
    write.write_report(study)
    return (study / "report.html").read_text()
