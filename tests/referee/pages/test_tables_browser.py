"""Tables in a real browser: sorted by keys. Needs Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from referee.pages.document import Document, Section, Table
from referee.pages.html_page import render_html
from referee.pages.markup import number_with_detail
from tests.referee.numerics.view.chromium import BROWSER, Chromium

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="no Chromium")]
ROWS = [
    ["B10", "1,200.5 [1, 9]", "90 s", "yes"],
    ["B2", "-3 % [-4 %, -2 %]", "2.0 hours", "no: it diverged"],
    ["B1", "-", "12 minutes", "yes"],
    ["b3", "2.5e+06", "1 minute", "yes"],
]
TABLE = Table(
    ["run", "loss", "time", "counted"],
    [[number_with_detail(cell) for cell in row] for row in ROWS],
    (3,),
    sortable=True,
)
SHOWN = "[...document.querySelectorAll('tbody tr')].filter(row => row.checkVisibility())"
NAMES = f"{SHOWN}.map(row => row.cells[0].innerText)"
SORTED = "[...document.querySelectorAll('th')].map(head => head.getAttribute('aria-sort'))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path) -> Chromium:
    page = tmp_path / "page.html"
    page.write_text(render_html(Document("t", [Section("Runs", [TABLE])])))
    browser.events.clear()
    browser.open(page)
    return browser


def press(browser: Chromium, column: int) -> list[str]:
    """Press Enter on a heading, and return the names in their order."""
    browser.evaluate(f"document.querySelectorAll('th button')[{column}].focus()")
    for kind in ("keyDown", "keyUp"):
        browser.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key="Enter",
            code="Enter",
            text="\r",
            windowsVirtualKeyCode=13,
        )
    names: list[str] = browser.evaluate(NAMES)
    return names


def test_a_heading_sorts_names_numbers_and_times_and_restores_the_order(opened: Chromium) -> None:
    assert press(opened, 0) == ["B1", "B2", "b3", "B10"]
    assert opened.evaluate(SORTED)[:4] == ["ascending", None, None, None]
    assert press(opened, 0) == ["B10", "b3", "B2", "B1"]
    assert opened.evaluate(SORTED)[:4] == ["descending", None, None, None]
    assert press(opened, 1) == ["B2", "B10", "b3", "B1"]  # a dash is last
    assert opened.evaluate(SORTED)[:4] == [None, "ascending", None, None]
    assert press(opened, 1) == ["b3", "B10", "B2", "B1"]
    assert press(opened, 1) == ["B10", "B2", "B1", "b3"]
    assert opened.evaluate(SORTED)[:4] == [None] * 4
    assert press(opened, 2) == ["b3", "B10", "B1", "B2"]  # 1 minute, 90 s, 12 minutes, 2 hours
    assert press(opened, 3) == ["B2", "B10", "B1", "b3"]
    assert opened.faults() == []
