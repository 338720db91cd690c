"""The view in a real browser: 10,000 calls, keyboard, filters, jumps, a saved map. Skipped where no Chromium is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from referee.__main__ import main
from tests.referee.numerics.view.chromium import BROWSER, Chromium
from tests.referee.numerics.view.records import HOSTILE, write_record

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium")
ROWS = "document.querySelectorAll('.node').length"
CHOSEN = "document.querySelector('.node[aria-selected=true]')?.title"
TITLES = "[...document.querySelectorAll('.node')].map(row => row.title)"
FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


def click(browser: Chromium, selector: str, text: str = "") -> None:
    """Click the first element that contains the text."""
    elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
    browser.evaluate(f"{elements}.find(one => one.textContent.includes({json.dumps(text)})).click()")


def test_only_the_rows_in_sight_of_10000_calls_are_elements(browser: Chromium, tmp_path: Path) -> None:
    write_record(tmp_path / "a", blocks=200, parts=49)
    assert main(["view", "-tp", str(tmp_path / "a"), "-o", str(tmp_path / "tree.html")]) == 0
    browser.open(tmp_path / "tree.html")
    click(browser, "button", "Open all")
    height = browser.evaluate("document.getElementById('space').clientHeight")
    assert height == 10000 * 26
    titles = set()
    for part in (0.0, 0.3, 0.7, 1.0):
        browser.evaluate(f"document.getElementById('tree').scrollTop = {part * height}")
        browser.evaluate(FRAME)
        assert 10 < browser.evaluate(ROWS) < 80
        titles |= set(browser.evaluate(TITLES))
    assert {"Module.h.0.Block.forward.0", "Module.h.199.part48.Linear.forward.0"} <= titles
    assert browser.faults() == []


def test_names_of_a_record_are_text(browser: Chromium, tmp_path: Path) -> None:
    write_record(tmp_path / "a", name=HOSTILE)
    write_record(tmp_path / "b", name=HOSTILE, wrong=(0, 1, 1))
    out = tmp_path / "out"
    assert main(["compare", "-tp", str(tmp_path / "a"), "-gp", str(tmp_path / "b"), "-o", str(out)]) == 0
    browser.open(out / "tree.html", width=390)
    assert HOSTILE in browser.evaluate(CHOSEN)
    assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert browser.evaluate("window.taken") is None
    assert browser.faults() == []
