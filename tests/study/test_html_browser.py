"""report.html in a real browser: nothing goes wrong, everything is drawn, nothing overflows a phone.

Needs Chromium; without one these tests are skipped.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpt2 import record
from study import report
from tests.study.records import VARIANTS, a_study, edit

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]

# Collects whatever goes wrong, from before the page's own scripts.
LISTEN = """<script>
const faults = [];
for (const name of ["error", "unhandledrejection", "securitypolicyviolation"])
  addEventListener(name, event => faults.push(name + ": " + (event.message || event.reason || event.blockedURI)), true);
for (const name of ["error", "warn"])
  console[name] = (...said) => faults.push("console." + name + ": " + said.join(" "));
</script>"""
# Once all is drawn: tries every switch, hides a variant, and leaves what was seen in the document.
LOOK = """<script>
addEventListener("load", async () => {
  const pause = milliseconds => new Promise(done => setTimeout(done, milliseconds));
  while (document.documentElement.dataset.drawn !== "yes" && faults.length === 0) await pause(20);
  const plots = [...document.querySelectorAll(".plot")];
  const count = what => Object.fromEntries(plots.map(plot => [plot.id, plot.querySelectorAll(what).length]));
  const seen = { drawn: count("svg.main-svg"), traces: count("g.trace"), labels: count("g.annotation") };
  seen.width = [document.documentElement.scrollWidth, innerWidth];
  seen.titles = {};
  for (const input of document.querySelectorAll("input[type=radio]")) {
    input.click();
    await pause(50);
    const plot = document.getElementById(input.dataset.figure);
    seen.titles[input.id] = [plot.layout.xaxis.title.text, plot.layout.yaxis.title.text, plot.layout.xaxis.type];
  }
  const button = document.querySelector(".legend button[data-variant=RAALL]");
  if (button) {
    button.click();
    await pause(200);
    const shown = trace => trace.meta && trace.meta.variant === "RAALL" && trace.visible;
    seen.left = plots.filter(plot => plot.data.some(shown)).map(plot => plot.id);
    seen.pressed = button.getAttribute("aria-pressed");
  }
  seen.dark = getComputedStyle(document.body).backgroundColor;
  seen.faults = faults;
  const said = "SEEN" + JSON.stringify(seen) + "NEES";
  if (parent !== window) parent.postMessage(said, "*");
  document.documentElement.innerHTML = "";
  document.documentElement.textContent = said;
});
</script>"""
FRAME = """<!doctype html><body><iframe src="watched.html" style="width:390px;height:3000px;border:0"></iframe>
<script>addEventListener("message", event => { document.body.textContent = event.data; });</script></body>"""


def look(study: Path, *options: str, phone: bool = False) -> dict[str, Any]:
    """What the page of a study shows after it has drawn itself and every switch was tried."""
    page = (study / "report.html").read_text()
    watched = page.replace("<title>", LISTEN + "<title>", 1).replace("</body>", LOOK + "</body>")
    (study / "watched.html").write_text(watched)
    (study / "phone.html").write_text(FRAME)
    assert BROWSER
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=20000",
    ]
    where = (study / ("phone.html" if phone else "watched.html")).as_uri()
    command = [BROWSER, *flags, *options, "--dump-dom", where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search("SEEN(.*)NEES", done.stdout)
    assert found, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


def figures(study: Path) -> dict[str, Any]:
    text = (study / "report.html").read_text()
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1]) if found else {}


def faultless(study: Path, *options: str, phone: bool = False) -> dict[str, Any]:
    """`look`, with nothing gone wrong and every specified figure drawn."""
    seen = look(study, *options, phone=phone)
    assert seen["faults"] == []
    assert set(seen["drawn"]) == set(figures(study))
    assert all(count >= 1 for count in seen["drawn"].values())
    return seen


def test_the_watch_sees_a_page_that_would_load_something(tmp_path: Path) -> None:
    report.write(a_study(tmp_path, seeds=1, variants=("B",)))
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</main>", '<img src="http://elsewhere.invalid/x.png"></main>'))
    assert any("securitypolicyviolation" in fault for fault in look(tmp_path)["faults"])


def test_every_figure_is_drawn_every_switch_works_and_nothing_goes_wrong(tmp_path: Path) -> None:
    report.write(a_study(tmp_path))
    seen = faultless(tmp_path)
    specified = figures(tmp_path)
    for name in ("validation", "training", "ranking"):
        assert seen["labels"][name] == len(VARIANTS)
    assert seen["traces"]["differences"] == len(specified["differences"]["data"])
    assert seen["titles"]["validation-0-1"][0] == "training time (minutes)"
    assert seen["titles"]["validation-0-2"][0] == "updates"
    assert seen["titles"]["validation-1-1"][1] == "validation loss (nats)"
    assert seen["titles"]["validation-2-1"][2] == "log"
    assert (seen["left"], seen["pressed"]) == ([], "false")


def test_nothing_overflows_a_phone(tmp_path: Path) -> None:
    report.write(a_study(tmp_path))
    seen = faultless(tmp_path, phone=True)
    assert seen["width"] == [390, 390]


def test_a_dark_page_is_dark(tmp_path: Path) -> None:
    report.write(a_study(tmp_path, seeds=2))
    light, dark = faultless(tmp_path), faultless(tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["dark"] != dark["dark"]
    assert max(map(int, re.findall(r"\d+", dark["dark"]))) < 64


def test_a_partial_study_of_one_seed_is_drawn_without_a_fault(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1, hellaswag=False)
    edit(study, "RAALL0", status="failed", error="NotFiniteError: loss nan")
    edit(study, "RALATE0", status="interrupted")
    (study / "runs" / "RAEARLY0" / "metrics.jsonl").unlink()
    record.write_json(study / "expected.json", {"variants": list(VARIANTS), "seeds": 3})
    report.write(study)
    faultless(study)


def test_a_study_of_one_run_and_one_evaluation_is_drawn_without_a_fault(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1, variants=("B",))
    value = json.loads((study / "runs" / "B0" / "run.json").read_text())
    edit(study, "B0", validation={"history": value["validation"]["history"][-1:]})
    report.write(study)
    faultless(study)
