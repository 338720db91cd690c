"""The view in a real browser: 10,000 calls, keyboard, filters, jumps, a saved map. Skipped where no Chromium is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from numerics.__main__ import main
from tests.numerics.view.chromium import BROWSER, Chromium
from tests.numerics.view.records import HOSTILE, tensor, write, write_record

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


def test_the_overflow_levels_of_one_record_are_filters(browser: Chromium, tmp_path: Path) -> None:
    row = {"input_args": [tensor(1.0)], "input_kwargs": {}, "output": [tensor(1.0)]}
    bad = {**row, "output": [tensor(1.0, Mean=float("nan"))]}
    names = [f"Functional.gelu.{number}.forward" for number in range(1000)]
    write(tmp_path / "rank0", {name: bad if name in names[700:702] else row for name in names}, {})
    assert main(["view", "-tp", str(tmp_path / "rank0"), "-o", str(tmp_path / "tree.html")]) == 0
    browser.open(tmp_path / "tree.html")
    click(browser, "#next")
    assert browser.evaluate(CHOSEN) == names[700]
    assert "critical" in browser.evaluate("document.getElementById('details').textContent")
    click(browser, "button[aria-pressed]", "critical (2)")
    assert browser.evaluate(TITLES) == names[700:702]
    assert browser.faults() == []


def test_unmatched_calls_are_matched_by_hand_and_the_saved_map_is_read(
    browser: Chromium, tmp_path: Path
) -> None:
    write_record(tmp_path / "a", name="layers", kind="Layer")
    write_record(tmp_path / "b", name="h.inner", blocks=4)
    arguments = ["compare", "-tp", str(tmp_path / "a"), "-gp", str(tmp_path / "b"), "-o"]
    assert main([*arguments, str(tmp_path / "first"), "--map", str(write_map(tmp_path))]) == 0
    browser.open(tmp_path / "first/tree.html")
    assert "unmatched" in browser.evaluate("document.getElementById('tools').textContent")
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    for target, golden in ((0, 1), (1, 2), (2, 3)):
        click(browser, "button", "Open all")
        browser.evaluate(
            f"document.querySelector('[title=\"Module.layers.{target}.Layer.forward.0\"]').click()"
        )
        click(browser, "#details button", "Match with")
        browser.evaluate(
            f"document.querySelector('[title=\"Module.h.inner.{golden}.Block.forward.0\"]').click()"
        )
    click(browser, "#save")
    saved = tmp_path / "map.json"
    for _ in range(100):
        if saved.exists() and saved.stat().st_size:
            break
        time.sleep(0.1)
    names = json.loads(saved.read_text())
    assert names == {
        "layers.2.part2": "h.inner.3.part2",
        "layers.0": "h.inner.1",
        "layers.1": "h.inner.2",
        "layers.2": "h.inner.3",
    }
    assert main([*arguments, str(tmp_path / "second"), "--map", str(saved)]) == 0
    rows = json.loads((tmp_path / "second/compare.json").read_text())["rows"]
    assert {(row["target"], row["golden"]) for row in rows if row["target"]} >= {
        ("Module.layers.1.part0.Linear.forward.0", "Module.h.inner.2.part0.Linear.forward.0")
    }
    assert all(row["matched_by"] == "map" for row in rows if row["target"])
    assert browser.faults() == []


def write_map(folder: Path) -> Path:
    (folder / "given.json").write_text('{"layers.2.part2": "h.inner.3.part2"}')
    return folder / "given.json"


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
