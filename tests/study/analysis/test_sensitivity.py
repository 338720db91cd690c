"""The effects that a study can detect, as ranges."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from referee.verdict import power
from referee.verdict.statistics import NoiseFloor, spread_interval
from study.analysis.designs import seed_hours, sensitivities
from study.analysis.verdict import judge
from study.report import report_data as build
from tests.checked_files import write_checked
from tests.study.report import rendered
from tests.study.sample_records import VARIANTS, a_study, edit


def test_the_range_of_effects_follows_the_chi_square_interval_of_the_spread(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path, seeds=5))
    (found,) = report.sensitivities
    spread = report.verdicts[0].test.spread
    assert spread is not None
    assert (found.variant, found.seeds, found.at_seeds, found.dof) == ("RALEARN", 5, 5, 4)
    low, high = (spread * math.sqrt(4 / stats.chi2.ppf(q, 4)) for q in (0.975, 0.025))
    assert found.mde_low == pytest.approx(power.mde(low, 5))
    assert found.mde_high == pytest.approx(power.mde(high, 5))
    for row in found.needed:
        effect = math.log1p(row.percent / 100)
        assert row.low == power.seeds_for(low, effect, 3, lambda seeds: 0.047)
        assert row.high == power.seeds_for(high, effect, 3, lambda seeds: 0.047)


def test_the_range_contains_the_true_effect_of_80_percent_power_in_95_percent_of_studies() -> None:
    draw, inside = np.random.default_rng(3), 0
    true = power.mde(0.01 * math.sqrt(1 + 1 / 2), 5)
    for _ in range(1000):
        values = 4 + 0.01 * draw.normal(size=(5, 3))
        table = {
            name: dict(enumerate(values[:, k].tolist())) for k, name in enumerate(("B", "RAALL", "RALEARN"))
        }
        (found,) = sensitivities(judge(table), None, 5, {}, 2, None)
        inside += found.mde_low <= true <= found.mde_high
    assert 0.92 <= inside / 1000 <= 0.98


def test_under_three_seeds_the_noise_floor_gives_the_range_that_three_seeds_would_have(
    tmp_path: Path,
) -> None:
    report = build.build_report(a_study(tmp_path, seeds=1))
    (found,) = report.sensitivities
    assert report.floor is not None
    assert (found.variant, found.seeds, found.at_seeds, found.dof) == (None, 1, 3, 3)
    assert found.spread == pytest.approx(report.floor.sigma * math.sqrt(1.25))


def test_the_range_of_a_running_study_is_that_of_its_planned_seeds(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=1)
    write_checked(study / "expected.json", {"variants": list(VARIANTS), "seeds": 5})
    (report,) = build.build_report(study).sensitivities
    assert (report.seeds, report.at_seeds) == (1, 5)
    assert report.mde_low == pytest.approx(power.mde(spread_interval(report.spread, report.dof)[0], 5))


def test_a_failed_seed_does_not_count_as_planned(tmp_path: Path) -> None:
    study = a_study(tmp_path, seeds=4)
    edit(study, "RALEARN3", status="failed", error="x")
    (report,) = build.build_report(study).sensitivities
    assert (report.variant, report.seeds, report.at_seeds) == ("RALEARN", 3, 3)
    edit(study, "RALEARN3", status="running")
    (report,) = build.build_report(study).sensitivities
    assert (report.seeds, report.at_seeds) == (3, 4)


def test_the_hours_of_a_seed_are_those_of_the_runs_clocks(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path, variants=(*VARIANTS, "MINE")))
    assert [one.seed_hours for one in report.sensitivities] == pytest.approx([6 * (3000 + 140) / 3600] * 2)
    assert seed_hours(report.runs, at_once=2) == pytest.approx(3 * (3000 + 140) / 3600)
    assert seed_hours(report.runs, at_once=20) == pytest.approx((3000 + 140) / 3600)


def test_without_differing_control_arms_there_is_no_range(tmp_path: Path) -> None:
    report = build.build_report(a_study(tmp_path, seeds=1, variants=("B", "RALEARN")))
    assert report.sensitivities == []
    assert sensitivities([], NoiseFloor(0.0, 6), 2, {}, 4, 1.0) == []
    assert "The detectable differences are not known" in rendered.markdown(report)


def test_the_hours_of_a_variant_are_the_mean_over_its_seeds(tmp_path: Path) -> None:
    study = a_study(tmp_path)
    edit(study, "B1", clock={"evaluate": 90.0 + 3 * 3600})
    (report,) = build.build_report(study).sensitivities
    assert report.seed_hours == pytest.approx(5 * (3000 + 140) / 3600 + 1)
