"""An existing plan is amended with variants that were added."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpt2.optimizer import warmup_iterations
from ra.variants import variant
from runtime.batch_plan import WARM_UP_STEPS, BatchPlan
from runtime.settings import AlternationSettings, Config
from study import amend_plan, plan_file, planner
from study.plan_file import Plan
from study.planner import CountedArms
from study.planning.micro_batch import MemoryPlanError, Predictions
from study.step_timing import DoesNotFitError, Timing
from study.study_settings import StudySettings
from tests.study.test_plan import resolved, steady, timing

ALTERNATION = AlternationSettings("output", 0.5, 100.0)
SPEEDS = {"B": 2.0, "RAALL": 2.0, "RALEARN": 3.0}


@pytest.fixture
def config(a100_config: Config) -> Config:
    """Return the study of an A100 with a small model, whose memory is predicted quickly."""
    model = dataclasses.replace(a100_config.model, layers=2, heads=2, width=64)
    return dataclasses.replace(a100_config, model=model)


class Place:
    """A study whose plan has variants with known step times."""

    def __init__(self, config: Config, folder: Path, equal_time: bool = False, gib: float = 40.0) -> None:
        self.config, self.folder, self.equal_time, self.gib = config, folder, equal_time, gib

    def make(self, *names: str, batch: BatchPlan | None = None, time_steps: Any = None) -> Plan:
        settings = StudySettings("s", names, 3, self.folder, self.equal_time)
        timed = time_steps or steady(SPEEDS)

        def count(existing: BatchPlan | None) -> CountedArms:
            return self.count(*names, batch=existing)

        return planner.make_plan(self.config, settings, resolved(self.gib), count, timed, batch)

    def count(self, *names: str, batch: BatchPlan | None = None) -> CountedArms:
        settings = StudySettings("s", names, 3, self.folder, self.equal_time)
        return planner.count_arms(self.config, settings, resolved(self.gib), self.variants(*names), batch)

    def variants(self, *names: str) -> Any:
        return {name: variant(name, self.config.model, ALTERNATION) for name in names}

    def add(self, plan: Plan, *names: str, time_steps: Any = None) -> Plan:
        def replan(batch: BatchPlan) -> Plan:
            return self.make(*names, batch=batch, time_steps=time_steps)

        arms = self.count(*names, batch=plan.batch).arms
        return amend_plan.with_variants(self.folder, plan, arms, replan)


def wsd(config: Config) -> Config:
    optimizer = dataclasses.replace(config.optimizer, schedule="wsd", decay_fraction=0.2)
    return dataclasses.replace(config, optimizer=optimizer)


def test_an_added_variant_gets_the_existing_count(config: Config, tmp_path: Path) -> None:
    place = Place(wsd(config), tmp_path)
    before = place.make("B", "RAALL")
    row = before.variants["B"]
    assert row.iterations == 3600 + WARM_UP_STEPS
    plan = place.add(before, "B", "RAALL", "RALATE", "RALEARN")
    assert [plan.variants[name] for name in ("B", "RAALL", "RALATE")] == [row] * 3
    added = plan.variants["RALEARN"]
    assert added == row.replace(cost_class="learned-output", predicted_bytes=added.predicted_bytes)
    assert plan.step_time_ratios["learned-output"].ratio == pytest.approx(1.5)
    assert plan_file.read(tmp_path) == plan


def test_at_equal_time_an_added_variant_gets_the_count_of_its_step_time(
    config: Config, tmp_path: Path
) -> None:
    place = Place(config, tmp_path, equal_time=True)
    plan = place.add(place.make("B"), "B", "RALEARN")
    assert plan.variants["B"].iterations == 3600 + WARM_UP_STEPS
    assert plan.variants["RALEARN"].iterations == 2400 + WARM_UP_STEPS


def test_the_memory_of_an_added_variant_is_predicted_at_the_existing_micro_batch(
    config: Config, tmp_path: Path
) -> None:
    place = Place(config, tmp_path, gib=80.0)
    plan = place.make("B")
    largest = plan.batch.micro
    smaller = planner.smaller_batch(plan, "B0")  # the card had less memory than predicted
    assert smaller
    plan = smaller
    micro = plan.batch.micro
    assert micro < largest
    batch = plan.batch
    plan = place.add(plan, "B", "RALEARN")
    learned = place.variants("RALEARN")["RALEARN"]
    assert plan.batch == batch
    assert plan.variants["RALEARN"].predicted_bytes == Predictions(config, resolved(80.0)).peak_bytes(
        learned, micro
    )


def test_an_added_variant_that_needs_more_memory_reduces_the_micro_batch_before_any_run(
    config: Config, tmp_path: Path
) -> None:
    predictions = Predictions(config, resolved())
    rows = Place(config, tmp_path).variants("B", "RALEARN")
    micro = Place(config, tmp_path).make("B").batch.micro
    needs = {name: predictions.peak_bytes(row, micro) for name, row in rows.items()}
    assert needs["B"] < needs["RALEARN"]
    place = Place(
        config, tmp_path, gib=(needs["B"] + needs["RALEARN"]) / 2 / 0.9 / 2**30
    )  # B fits, RALEARN does not
    before = place.make("B")
    assert before.batch.micro == micro
    plan = place.add(before, "B", "RALEARN")
    smaller = plan.batch.micro
    assert smaller < micro
    assert smaller * plan.batch.accumulation == 512
    for name, row in rows.items():
        assert plan.variants[name].predicted_bytes == predictions.peak_bytes(row, smaller)
    assert any(
        f"added: RALEARN; does not fit in memory at micro-batch {micro}" in note for note in plan.notes
    )
    assert plan_file.read(tmp_path) == plan


def test_an_added_variant_that_runs_out_of_memory_while_timed_reduces_the_micro_batch(
    config: Config, tmp_path: Path
) -> None:
    place = Place(config, tmp_path)
    plan = place.make("B")
    micro = plan.batch.micro

    def time_steps(names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
        if "RALEARN" in names and batch.micro == micro:
            raise DoesNotFitError("out of memory")
        return {name: timing(SPEEDS[name]) for name in names}

    plan = place.add(plan, "B", "RALEARN", time_steps=time_steps)
    assert plan.batch.micro == micro // 2
    assert any("added: RALEARN" in note for note in plan.notes)


def test_a_variant_that_never_fits_is_refused_and_the_plan_is_unchanged(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(config, tmp_path)
    plan = plan_file.write(tmp_path, place.make("B"))
    fits = Predictions.fits
    monkeypatch.setattr(
        Predictions, "fits", lambda self, it, micro: it.name != "RALEARN" and fits(self, it, micro)
    )
    with pytest.raises(MemoryPlanError, match=r"RALEARN .*for one sequence") as caught:
        place.add(plan, "B", "RALEARN")
    assert "\n" not in str(caught.value)
    assert plan_file.read(tmp_path) == plan


def test_an_arm_with_a_warm_up_of_its_own_has_it_under_wsd(config: Config, tmp_path: Path) -> None:
    place, arm = Place(wsd(config), tmp_path), "B+WARMUP=0.5"
    alone = place.make(arm, time_steps=steady({arm: 2.0}))
    for plan in (place.make("B", arm), place.add(place.make("B"), "B", arm), place.add(alone, "B")):
        rows = plan.variants
        assert rows["B"].iterations == rows[arm].iterations
        assert rows[arm].warmup_iterations == warmup_iterations(rows[arm].iterations, 0.5)
        assert rows["B"].warmup_iterations != rows[arm].warmup_iterations
