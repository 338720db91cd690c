"""Pages in a real browser: on a phone, by keyboard, on paper and without scripts. Needs Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from referee.pages.document import (
    BulletList,
    Details,
    Document,
    Figure,
    Legend,
    Note,
    Paragraph,
    Section,
    Table,
)
from referee.pages.figures import axis, figure, line
from referee.pages.html_page import render_html
from referee.pages.markup import Code, ColorLabel, Link
from tests.referee.numerics.view.chromium import BROWSER, Chromium

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="no Chromium")]
LONG = "x" * 200
NAMES = ["B", "RALEARN"]
WIDE = Table(
    [f"column {number}" for number in range(12)],
    [[f"row {row}", *["1,234.5 [1, 2]"] * 11] for row in range(4)],
    sortable=True,
)
OPTIONS = [{"name": name, "layout": {"yaxis": {"type": name}}} for name in ("linear", "log")]


def document() -> Document:
    lines = [
        line(name, "var(--v1)", name, label=name, x=[1, 2], y=[3, 4 + place])
        for place, name in enumerate(NAMES)
    ]
    choice = {"label": "Scale", "options": OPTIONS}
    narrow: dict[str, Any] = {}
    spec = figure(lines, 300, (60, 60, 20, 40), narrow, [choice], xaxis=axis("tokens"), yaxis=axis("loss"))
    sections = [
        Section("Results", [WIDE]),
        Section(
            "Curves",
            [
                Legend([ColorLabel(name, place) for place, name in enumerate(NAMES)]),
                Figure("curves", spec, f"A caption {LONG}"),
            ],
        ),
        Section(
            f"Folded {LONG}", [Details(f"more {LONG}", [Paragraph("inside the fold"), BulletList([LONG])])]
        ),
        Section("Links", [Paragraph(("see ", Link(LONG, "runs/B0/run.json"), Code(LONG)))]),
        Section("Method", [Note(LONG)]),
    ]
    return Document(f"A study {LONG}", sections, subtitle=LONG)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render_html(document()))
    return path


def opened(browser: Chromium, page: Path, **size: Any) -> None:
    browser.events.clear()
    browser.open(page, **size)
    browser.evaluate(
        "new Promise(done => { const look = () => document.documentElement.dataset.drawn === 'yes' ? done() :"
        " setTimeout(look, 20); look(); })"
    )


def test_a_phone_does_not_scroll_sideways_with_every_fold_open(browser: Chromium, page: Path) -> None:
    width = 320
    opened(browser, page, width=width, height=780)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    beyond = browser.evaluate(
        "[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll, pre, svg')"
        " && one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.outerHTML.slice(0, 80))"
    )
    assert beyond == []
    box = "document.querySelector('.scroll')"
    assert browser.evaluate(f"{box}.scrollWidth > {box}.clientWidth")  # the table scrolls in its box
    browser.evaluate(f"{box}.scrollLeft = 300")
    name = browser.evaluate("document.querySelector('tbody th').getBoundingClientRect().left")
    assert name >= 0  # and its names stay in sight
    assert browser.faults() == []


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(browser: Chromium, page: Path) -> None:
    opened(browser, page)
    browser.evaluate(
        "document.querySelectorAll('details').forEach(one => { one.open = true; }); window.reached = [];"
    )
    expected = browser.evaluate(
        "[...document.querySelectorAll('a, button, summary, .scroll')]"
        ".filter(one => one.checkVisibility()).length + 1"  # the switch is one stop: its first option
    )
    for _ in range(expected + 10):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        browser.evaluate(
            "(one => { if (one !== document.body && !reached.includes(one)) reached.push(one);"
            " const mark = one.matches('.choice input') ? one.nextElementSibling : one;"
            " one.dataset.marked = getComputedStyle(mark).outlineStyle; })(document.activeElement)"
        )
    found = browser.evaluate("reached.map(one => [one.localName, one.dataset.marked])")
    assert len(found) == expected
    assert {outline for _, outline in found} == {"solid"}
    assert {name for name, _ in found} == {"a", "button", "summary", "div", "input"}
