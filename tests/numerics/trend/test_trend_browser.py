"""The page in a real browser: pixels of extremes, keyboard, zoom, ranks, two runs, hostile names, dark colors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from numerics.__main__ import main
from numerics.trend import page as trend_pages
from tests.numerics.trend.monitor_files import HOSTILE, names, noisy, write_monitor
from tests.numerics.view.chromium import BROWSER, Chromium

pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium")
WHERE = "document.getElementById('where').textContent"
DRAWN = "Number(document.documentElement.dataset.drawn || 0)"
# The colors of one row of a map, as a list of different colors; the gutter of the first map is left out.
COLORS = """(map, row, rows) => {
  const canvas = document.querySelectorAll('#maps canvas')[map], height = (canvas.clientHeight - 20) / rows;
  const left = map ? 8 : innerWidth > 640 ? 210 : 90, y = Math.round((row + 0.25) * height);
  const pixels = canvas.getContext('2d').getImageData(left, y, canvas.width - left, 1).data, found = new Set();
  for (let at = 0; at < pixels.length; at += 4) found.add(pixels.slice(at, at + 3).join());
  return [...found];
}"""
BROKEN = {"light": "214,0,111", "dark": "255,63,164"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("browser")) as chromium:
        yield chromium


def show(browser: Chromium, folders: list[Path], out: Path, **options: int) -> None:
    assert main(["trend", *map(str, folders), "-o", str(out)]) == 0
    browser.open(out / "trend.html", **options)
    wait(browser, 0)


def faults(browser: Chromium) -> list[str]:
    """The errors and warnings of the page, without that on the pixels that this test reads."""
    return [one for one in browser.faults() if "getImageData" not in one]


def wait(browser: Chromium, before: int) -> None:
    """Wait for a drawing after the `before` ones, and for the chosen cell."""
    for _ in range(600):
        if browser.evaluate(DRAWN) > before:
            return
        time.sleep(0.05)
    raise AssertionError("the page drew nothing")


def press(browser: Chromium, *keys: str) -> str:
    """Press keys on the maps. Returns the description of the chosen cell."""
    for key in keys:
        event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}})"
        browser.evaluate(f"document.getElementById('maps').dispatchEvent({event})")
        browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found: str = browser.evaluate(WHERE)
    return found


@pytest.mark.parametrize("dark", [False, True])
def test_one_extreme_in_many_steps_is_visible_and_the_first_anomaly_is_chosen(
    dark: bool, browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trend_pages, "CELLS", 60_000)  # three steps a cell
    norms = noisy(10, 9000)
    norms[4, 6001] = np.nan
    norms[7, 8000] *= 60
    write_monitor(tmp_path / "a", norms)
    show(browser, [tmp_path / "a"], tmp_path / "out", dark=dark)
    colors = [browser.evaluate(f"({COLORS})(0, {row}, 10)") for row in range(10)]
    broken = [BROKEN["dark" if dark else "light"] in found for found in colors]
    assert broken == [row == 4 for row in range(10)]
    assert f"{names()[4]}, steps 6001 to 6003: norm" in browser.evaluate(WHERE)
    assert "NaN" in browser.evaluate(WHERE)
    assert "is not finite" in browser.evaluate(WHERE)
    found = press(browser, "n")
    assert f"{names()[7]}, steps 7999 to 8001" in found
    assert "Anomaly: step 8001" in found
    assert faults(browser) == []


def test_names_are_text_on_a_narrow_screen(browser: Chromium, tmp_path: Path) -> None:
    norms = noisy(2, 80)
    norms[1, 70] = np.inf
    write_monitor(tmp_path / "a", norms, tensors=[f"h.{HOSTILE}", f"{HOSTILE}.b"])
    show(browser, [tmp_path / "a"], tmp_path / "out", width=390)
    assert f"{HOSTILE}.b, step 71: norm Inf" in browser.evaluate(WHERE)
    assert browser.evaluate("document.querySelectorAll('img, main script').length") == 0
    assert browser.evaluate("window.taken") is None
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert faults(browser) == []
