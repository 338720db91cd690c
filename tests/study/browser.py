"""Draw a study's page in Chromium and return the drawn elements."""

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
)

# Collect errors, from before the scripts of the page.
LISTEN = """<script>
const faults = [];
for (const name of ["error", "unhandledrejection", "securitypolicyviolation"])
  addEventListener(name, event => faults.push(name + ": " + (event.message || event.reason || event.blockedURI)), true);
for (const name of ["error", "warn"])
  console[name] = (...said) => faults.push("console." + name + ": " + said.join(" "));
</script>"""
LOOK = f"<script>{Path(__file__).with_name('watch.js').read_text()}</script>"
FRAME = """<!doctype html><body><iframe src="watched.html" style="width:390px;height:3000px;border:0"></iframe>
<script>addEventListener("message", event => { document.body.textContent = event.data; });</script></body>"""


def browse(*options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER
    return subprocess.run([BROWSER, *FLAGS, *options], capture_output=True, text=True, timeout=120)


def look(study: Path, phone: bool = False) -> dict[str, Any]:
    """Return the elements of a study's page after every control was used; see watch.js."""
    page = (study / "report.html").read_text()
    watched = page.replace("<title>", LISTEN + "<title>", 1).replace("</body>", LOOK + "</body>")
    (study / "watched.html").write_text(watched)
    (study / "phone.html").write_text(FRAME)
    where = (study / ("phone.html" if phone else "watched.html")).as_uri()
    done = browse("--dump-dom", where)
    found = re.search("SEEN(.*)NEES", done.stdout)
    assert found, done.stderr[-2000:]
    content: dict[str, Any] = json.loads(html.unescape(found[1]))
    return content


def figures(study: Path) -> dict[str, Any]:
    """Return the figures that the page specifies."""
    text = (study / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1]) if found else {}


def empty(found: dict[str, Any]) -> list[str]:
    """Return the figures and views without a visible mark."""
    views = found["drawn"] | found["switched"]
    return [name for name, traces in views.items() if not any(trace["marks"] for trace in traces)]


def faultless(study: Path, phone: bool = False) -> dict[str, Any]:
    """Return `look`, after checks that no error occurred and every specified figure is drawn."""
    drawn = look(study, phone=phone)
    assert drawn["faults"] == []
    assert set(drawn["drawn"]) == set(figures(study))
    assert empty(drawn) == []
    return drawn


def percent(difference: float) -> float:
    """A difference of losses as the change of perplexity that it is."""
    return 100 * math.expm1(difference)


def printed(cell: str, interval: dict[str, Any], of_loss: bool) -> None:
    """The first "m [l, h]" of a text is the interval, to the digits it has; of_loss: as perplexity."""
    plain = " ".join(cell.replace("\u2212", "-").split())
    number = r"([-+]?[\d.]+)(?: %)?"
    found = re.search(rf"{number}(?:, 95 % interval)? \[{number}, {number}\]", plain)
    assert found, plain
    for text, part in zip(found.groups(), ("mean", "low", "high"), strict=True):
        value = math.exp(interval[part]) if of_loss else percent(interval[part])
        half = 0.5000001 * 10.0 ** -len(text.partition(".")[2])
        assert float(text) == pytest.approx(value, abs=half), plain
