"""The content of report.html, without a browser."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from referee.pages import html_page
from study import curves
from study.report import report_data as build
from study.report import report_figures
from tests.checked_files import write_checked
from tests.study.browser import percent
from tests.study.report.rendered import outline, page
from tests.study.sample_records import STEPS, VARIANTS, a_plan, a_record, a_run, a_study, edit


def specified(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found
    value: dict[str, Any] = json.loads(
        found[1], parse_constant=lambda name: pytest.fail(f"{name} in a figure")
    )
    return value


def test_the_page_is_well_formed_and_loads_nothing(tmp_path: Path) -> None:
    found = outline(page(a_study(tmp_path)))
    assert found.loads == []
    records = {link for link in found.links if not link.startswith("#")}
    assert records == {f"runs/{name}{seed}/run.json" for name in VARIANTS for seed in range(3)}
    assert all((tmp_path / link).is_file() for link in records)
    assert {link[1:] for link in set(found.links) - records} <= set(found.ids)


def test_every_drawn_interval_is_that_of_report_json(tmp_path: Path) -> None:
    text = page(a_study(tmp_path, effect=-0.02))
    content = json.loads((tmp_path / "report.json").read_text())
    expected = {row["variant"]: row["against_controls"] for row in content["rows"]}
    expected |= {found["variant"]: found["test"]["difference"] for found in content["verdicts"]}
    drawn = specified(text)["differences"]["data"]
    assert len(drawn) == len(expected) == 5
    for trace in drawn:
        interval = expected[trace["legendgroup"]]
        middle = trace["x"][0]
        assert middle == pytest.approx(percent(interval["mean"]))
        assert middle + trace["error_x"]["array"][0] == pytest.approx(percent(interval["high"]))
        assert middle - trace["error_x"]["arrayminus"][0] == pytest.approx(percent(interval["low"]))


def test_every_interval_of_the_table_is_that_of_report_json(tmp_path: Path) -> None:
    text = page(a_study(tmp_path)).replace("\u2212", "-").replace("\u00a0", " ")
    for row in json.loads((tmp_path / "report.json").read_text())["rows"]:
        final, against = row["final_loss"], row["against_controls"]
        assert f"[{math.exp(final['low']):.2f}, {math.exp(final['high']):.2f}]" in text
        if against:
            assert f"[{percent(against['low']):+.2f} %, {percent(against['high']):+.2f} %]" in text


def test_the_noise_bands_are_a_t_interval_of_the_spread_of_the_control_arms(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    report = build.build_report(study)
    assert report.floor is not None
    half = stats.t.ppf(0.975, 9) * report.floor.sigma * math.sqrt((1 + 1 / 4) / 3)
    drawn = report_figures.differences(report)
    assert drawn is not None
    assert drawn["layout"]["shapes"][0]["x1"] == pytest.approx(percent(report.verdicts[0].margin))
    band = specified(page(study))["over-training"]["data"][0]["y"]
    places = len(band) // 2  # the upper edge over training, and the lower one back
    assert band[places - 1] == pytest.approx(percent(half), rel=1e-4)
    assert band[places] == pytest.approx(percent(-half), rel=1e-4)


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_fewer_than_three_seeds_there_is_no_verdict(tmp_path: Path, seeds: int) -> None:
    text = page(a_study(tmp_path, seeds=seeds, effect=-0.2))
    assert "better than standard attention" not in text
    assert f"cannot tell, {seeds} of 3 needed seeds finished" in text
    assert any("fill" in trace for trace in specified(text)["validation"]["data"]) == (seeds > 1)


def test_a_study_without_a_finished_run_has_a_page(tmp_path: Path) -> None:
    write_checked(tmp_path / "expected.json", {"variants": ["B"], "seeds": 1})
    text = page(tmp_path)
    outline(text)
    assert "No finished run yet" in text
    assert "plotly" not in text


def test_variants_that_share_no_seed_have_no_differences_over_training(tmp_path: Path) -> None:
    study = a_study(tmp_path, variants=("B", "RALEARN"), seeds=2)
    edit(study, "B0", status="failed", error="x")
    edit(study, "RALEARN1", status="failed", error="x")
    assert "over-training" not in specified(page(study))


def test_differences_over_training_are_paired_means_against_the_arms(tmp_path: Path) -> None:
    study = a_study(tmp_path, effect=-0.05)
    figure = specified(page(study))["over-training"]
    built = {run.name: run.record.validation.history for run in build.build_report(study).runs}
    by_seed = np.array(
        [[[row[2] for row in built[f"{name}{seed}"]] for seed in range(3)] for name in VARIANTS]
    )
    losses = by_seed.mean(1)
    expected = 100 * np.expm1(losses - losses[:4].mean(0))  # the first four are the control arms
    lines = [trace for trace in figure["data"] if trace.get("meta")]
    assert np.array([trace["y"] for trace in lines]) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert [trace["x"][0] for trace in lines] == [built["B0"][0][0]] * 5


def test_strings_of_records_have_no_effect_on_the_page(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\" onload='x'"
    edit(study, "B0", notes=[evil], commit=evil)
    edit(study, "B1", target={"device": evil, "torch": evil})
    edit(study, "RAALL1", status="failed", error=evil)
    plan = a_plan(notes=[evil], study=evil)
    write_checked(study / "plan.json", plan)
    text = page(study)
    assert outline(text).loads == []
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "<img" not in outside
    assert "alert(1)</script>" not in text
    assert 'onload="' not in outside


def test_the_page_needs_no_torch(tmp_path: Path) -> None:
    a_study(tmp_path)
    code = (
        "import sys, pathlib; from study.report.report_page import write_report; "
        "write_report(pathlib.Path(sys.argv[1])); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(html_page.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root).returncode == 0


def test_validation_curves_are_the_records_means_and_ranges(tmp_path: Path) -> None:
    used = [run for run in build.build_report(a_study(tmp_path)).runs if run.used]
    found = next(curve for curve in curves.validation_curves(used) if curve.variant == "RAALL")
    histories = [run.record.validation.history for run in used if run.variant == "RAALL"]
    for place, rows in enumerate(zip(*histories, strict=True)):
        losses = [row[2] for row in rows]
        assert found.tokens[place] == rows[0][0]
        assert found.seconds[place] == pytest.approx(sum(row[1] for row in rows) / 3)
        assert found.loss[place] == pytest.approx(sum(losses) / 3)
        assert (found.low[place], found.high[place]) == (min(losses), max(losses))


def test_a_curve_of_seeds_with_other_ends_ends_at_their_mean() -> None:
    used = []
    for seed, steps in enumerate((STEPS, STEPS // 2)):
        used.append(a_run(a_record("B", seed, 4.0 + seed, steps)))
    (found,) = curves.validation_curves(used)
    ends = [run.record.validation.history[-1] for run in used]
    assert found.tokens == sorted(found.tokens)
    assert found.tokens[-1] == sum(row.tokens for row in ends) / 2
    assert found.loss[-1] == pytest.approx(sum(row.loss for row in ends) / 2)
    shared = set.intersection(*({row.tokens for row in run.record.validation.history} for run in used))
    assert found.tokens[:-1] == [tokens for tokens in sorted(shared) if tokens < found.tokens[-1]]
