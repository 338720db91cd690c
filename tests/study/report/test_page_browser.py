"""report.html in a real browser: it draws and prints the numbers of report.json, and nothing goes wrong.

Needs Chromium; without one these tests are skipped.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from study.report import report_page as write
from tests.checked_files import write_checked
from tests.study.browser import BROWSER, empty, faultless, look, percent
from tests.study.sample_records import VARIANTS, a_study, edit

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")]
Traces = list[dict[str, Any]]


@dataclass
class DrawnPage:
    """A study's page as the browser showed it, and its report.json."""

    study: Path
    page: dict[str, Any]
    report: dict[str, Any]

    def drawn(self, figure: str) -> Traces:
        """The traces of a figure, or of a figure after a switch."""
        traces: Traces = (self.page["drawn"] | self.page["switched"])[figure]
        return traces


@pytest.fixture(scope="module")
def browsed(tmp_path_factory: pytest.TempPathFactory) -> DrawnPage:
    """A study in which no two numbers of a variant are the same: RALEARN ends early and one of B's losses is low."""
    study = a_study(tmp_path_factory.mktemp("uneven"), effect=-0.02, ends={"RALEARN": 270})
    for place, name in enumerate(VARIANTS):
        for seed in range(3):
            done = json.loads((study / "runs" / f"{name}{seed}" / "run.json").read_text())["progress"]
            timed = (
                (done["iterations"] - 3 - place) * done["tokens"] / done["iterations"]
            )  # the first are not timed
            edit(study, f"{name}{seed}", hellaswag={"acc": 0.27 + 0.01 * place, "acc_norm_stderr": 0.007},
                 throughput={"tokens_per_second": timed / done["train_seconds"]})  # fmt: skip
    history = json.loads((study / "runs" / "B1" / "run.json").read_text())["validation"]["history"]
    edit(study, "B1", validation={"history": [*history[:2], [*history[2][:2], 3.9], *history[3:]]})
    write.write_report(study)
    return DrawnPage(study, faultless(study), json.loads((study / "report.json").read_text()))


def by_variant(traces: Traces) -> dict[str, dict[str, Any]]:
    """The lines that carry a name; bands do not."""
    return {trace["variant"]: trace for trace in traces if trace.get("label")}


def is_drawn_at(trace: dict[str, Any], middle: float, low: float, high: float) -> None:
    """The estimate and its bar are in the data, and on the screen to the pixel."""
    assert trace["x"][0] == pytest.approx(middle)
    assert middle + trace["plus"][0] == pytest.approx(high)
    assert middle - trace["minus"][0] == pytest.approx(low)
    assert trace["points"][0][0] == pytest.approx(middle, abs=trace["pixel"][0])
    assert trace["errors"] == [pytest.approx([low, high], abs=trace["pixel"][0])]


def ends(trace: dict[str, Any], x: float, y: float, log: bool = False) -> None:
    """The line's last point is there, in the data and on the screen to the pixel."""
    assert (trace["x"][-1], trace["y"][-1]) == pytest.approx((x, y), rel=1e-5)
    at = trace["points"][-1]
    assert at[0] == pytest.approx(x, abs=trace["pixel"][0])
    assert at[1] == pytest.approx(math.log10(y) if log else y, abs=trace["pixel"][1])


def test_the_check_detects_requests_of_a_page_and_an_empty_figure(tmp_path: Path) -> None:
    write.write_report(a_study(tmp_path, seeds=1, variants=("B", "RALEARN")))
    page = tmp_path / "report.html"
    text = page.read_text().replace("</main>", '<img src="http://elsewhere.invalid/x.png"></main>')
    bare = re.sub(r'"zeroline":false,"range":\[[^]]*\]', '"zeroline":false,"range":[20,40]', text)
    assert bare != text  # the differences lie outside their axes
    page.write_text(bare)
    drawn = look(tmp_path)
    assert any("securitypolicyviolation" in fault for fault in drawn["faults"])
    assert empty(drawn) == ["differences"]


def test_every_trace_is_drawn_and_every_control_works(browsed: DrawnPage) -> None:
    page = browsed.page
    assert {
        name for name, traces in page["drawn"].items() if not all(trace["marks"] for trace in traces)
    } == set()
    for name in ("validation", "over-training"):
        assert page["labels"][name] == len(VARIANTS)
    assert page["titles"]["validation-0-1"][0] == "training time (minutes)"
    assert (page["left"], page["pressed"]) == ([], "false")


def test_hovering_over_a_point_shows_its_numbers(browsed: DrawnPage) -> None:
    output = browsed.page["hovered"]
    assert {name for name, labels in output.items() if not any(labels)} == set()
    first = browsed.report["verdicts"][0]["test"]["difference"]  # the topmost line of the figure
    assert f"{percent(first['mean']):+.3f}" in "".join(output["differences"]).replace("\u2212", "-")


def test_differences_are_drawn_at_the_intervals_of_report_json_with_the_margin(
    browsed: DrawnPage,
) -> None:
    expected = {row["variant"]: row["against_controls"] for row in browsed.report["rows"]}
    drawn = {trace["variant"]: trace for trace in browsed.drawn("differences")}
    assert len(expected) == 5
    assert set(drawn) == set(expected)
    for name, interval in expected.items():
        is_drawn_at(drawn[name], *(percent(interval[part]) for part in ("mean", "low", "high")))
    margin = browsed.report["verdicts"][0]["margin"]
    pixel = 1.5 * browsed.drawn("differences")[0]["pixel"][0]
    assert [percent(-margin), percent(margin)] == pytest.approx(
        max(browsed.page["shapes"]["differences"], key=lambda x: x[1] - x[0]), abs=pixel
    )


def test_validation_curves_end_at_the_final_losses_on_every_axis(browsed: DrawnPage) -> None:
    first, time = (by_variant(browsed.drawn(name)) for name in ("validation", "validation-0-1"))
    for row in browsed.report["rows"]:
        name, final = row["variant"], row["final_loss"]["mean"]
        ends(first[name], row["tokens"], math.exp(final), log=True)
        ends(time[name], row["train_seconds"] / 60, math.exp(final), log=True)


def test_alternation_is_that_of_report_json(browsed: DrawnPage) -> None:
    layers = browsed.drawn("alternation0")
    for moment, place in (("first", 0), ("last", -1)):
        assert [line["y"][place] for line in layers] == pytest.approx(
            browsed.report["learned"]["RALEARN"][moment]
        )


def rows_under(browsed: DrawnPage, *headings: str) -> dict[str, list[str]]:
    """The rows of the table that has these headings, by their first cell."""
    table = next(table for table in browsed.page["tables"] if set(headings) <= set(table[0]))
    return {row[0].strip(): row for row in table[1:]}


def test_printed_scores_and_items_are_those_of_report_json(browsed: DrawnPage) -> None:
    printed_scores = rows_under(browsed, "acc", "acc_norm", "items")
    for row in browsed.report["rows"]:
        for cell, key in zip(printed_scores[row["variant"]][1:3], ("acc", "acc_norm"), strict=True):
            found = re.fullmatch(r"([\d.]+) ± ([\d.]+) %( †)?", " ".join(cell.split()))
            assert found, cell
            rate, error = (row["hellaswag"][part] for part in (key, f"{key}_stderr"))
            assert (float(found[1]), float(found[2])) == pytest.approx((100 * rate, 100 * error), abs=0.0501)
            assert (found[3] is not None) == (abs(rate - 0.25) <= 2 * error)


def test_long_unbroken_texts_of_records_do_not_widen_the_page_on_a_phone(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1)
    long = "https://example.invalid/" + "x" * 200
    edit(study, "B0", environment={"platform": long, "variables": {"OMP_NUM_THREADS": long}},
         target={"device": long, "driver": long}, commit="c" * 200, notes=[long])  # fmt: skip
    edit(study, "RAALL0", status="failed", error=long)
    edit(study, "RALATE0", hellaswag={"acc": None, "items": None, "absent": long})
    write_checked(study / "plan.json", {"notes": [long], "budget": {}})
    write.write_report(study)
    page = faultless(study, phone=True)
    assert page["width"] == [390, 390]
    assert page["beyond"] == []


def test_a_partial_study_of_one_seed_is_drawn_without_errors(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1, hellaswag=False)
    edit(study, "RAALL0", status="failed", error="NotFiniteError: loss nan")
    edit(study, "RALATE0", status="interrupted")
    (study / "runs" / "RAEARLY0" / "metrics.jsonl").unlink()
    write_checked(study / "expected.json", {"variants": list(VARIANTS), "seeds": 3})
    write.write_report(study)
    faultless(study)
