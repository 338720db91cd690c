"""Speed: step-time ratios, and the expected difference at equal time."""

import math
from pathlib import Path
from typing import Any

import pytest

from study.report import method as sentences
from study.report import report_data as build
from study.step_timing import slopes
from tests.checked_files import write_checked
from tests.study.report import rendered
from tests.study.sample_records import STEPS, UPDATE, a_plan, a_record, a_run, a_study


def plan(ratio: tuple[float, float, float] | None = (1.05, 1.03, 1.08), **budget: Any) -> dict[str, Any]:
    """plan.json of a study whose RALEARN is slower by `ratio` (with its interval)."""
    content = a_plan()
    content["budget"] |= {"max_time_seconds": 40} | budget
    if ratio:
        value, low, high = ratio
        content["step_time_ratios"] = {
            "standard": {"to": "standard", "ratio": 1.0, "low": 1.0, "high": 1.0},
            "learned": {"to": "standard", "ratio": value, "low": low, "high": high},
        }
    return content


def with_plan(folder: Path, content: dict[str, Any], effect: float = -0.02) -> build.Report:
    study = a_study(folder, effect=effect)
    write_checked(study / "plan.json", content)
    return build.build_report(study)


def test_the_ratio_of_step_times_is_reported_with_its_interval_and_without_a_verdict(tmp_path: Path) -> None:
    built = with_plan(tmp_path, plan())
    (speed,) = built.speeds
    assert (speed.variant, speed.ratio, speed.low, speed.high) == ("RALEARN", 1.05, 1.03, 1.08)
    text = rendered.markdown(built)
    assert "1.050 [1.030, 1.080]" in text
    low, high = speed.at_equal_time or (0.0, 0.0)
    assert f"{sentences.percent(low)} to {sentences.percent(high)}" in text
    assert text.count("**RALEARN**") == 1  # one verdict


def test_the_difference_at_equal_time_follows_the_late_slope_of_the_control_arms(tmp_path: Path) -> None:
    built = with_plan(tmp_path, plan())
    controls = [run for run in built.runs if run.variant != "RALEARN"]
    slope = slopes(controls)
    assert slope is not None
    low, high = slope
    assert 0 < low < high
    found, centre = built.speeds[0].at_equal_time, built.verdicts[0].test.difference.mean
    assert found == pytest.approx((centre + low * math.log(1.03), centre + high * math.log(1.08)))


def test_a_faster_variant_gains_at_equal_time(tmp_path: Path) -> None:
    built = with_plan(tmp_path, plan((0.9, 0.88, 0.92)))
    found, centre = built.speeds[0].at_equal_time, built.verdicts[0].test.difference.mean
    assert found is not None
    assert found[0] < found[1] < centre


def test_a_loss_that_is_linear_in_ln_tokens_has_that_slope_exactly() -> None:
    value = a_record("B", 0, 4.0)
    value["validation"]["history"] = [
        [tokens, 1.0, 4.0 + 0.3 * math.log(value["progress"]["tokens"] / tokens)]
        for tokens, _, _ in value["validation"]["history"]
    ]
    assert slopes([a_run(value)]) == pytest.approx((0.3, 0.3))


def test_a_loss_that_rises_late_or_was_not_evaluated_gives_no_estimate_at_equal_time(tmp_path: Path) -> None:
    value = a_record("B", 0, 9.0)
    end = [STEPS * UPDATE, 2.0, 9.0]
    value["validation"]["history"] = [[STEPS * UPDATE * 6 // 10, 1.0, 4.0], end]
    assert slopes([a_run(value)]) is None
    value["validation"]["history"] = [end]
    assert slopes([a_run(value)]) is None
    assert slopes([]) is None


def test_a_verdict_at_equal_time_states_so_first_and_gives_the_number_of_updates(tmp_path: Path) -> None:
    study = a_study(tmp_path, effect=-0.1, ends={"RALEARN": 285})
    write_checked(study / "plan.json", plan(equal_time=True))
    report = build.build_report(study)
    assert "At equal time (285 of 300 updates), **RALEARN** (exploratory) is better" in rendered.markdown(
        report
    )
    assert report.speeds[0].at_equal_time is None


def test_evaluations_before_half_and_after_nine_tenths_of_the_tokens_do_not_enter_the_slope() -> None:
    value = a_record("B", 0, 4.0)
    end = value["progress"]["tokens"]
    slope_at = {0.3: 2.0, 0.49: 0.9, 0.5: 0.3, 0.7: 0.2, 0.9: 0.1, 0.95: 0.0}
    value["validation"]["history"] = [
        [int(end * share), 1.0, 4.0 - slope * math.log(share)] for share, slope in (slope_at | {1: 0}).items()
    ]
    run = a_run(value)
    assert slopes([run]) == pytest.approx((0.1, 0.3), rel=1e-3)
