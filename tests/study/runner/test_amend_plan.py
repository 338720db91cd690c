"""A plan that stands: the same learning rates where it is made anew, and room and time for what is added to it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import run_record
from gpt2.config.batch import BatchPlan
from gpt2.config.config import Config
from gpt2.system import files
from gpt2.train.optimizer import warmup_iterations
from gpt2.train.trainer import WARM_UP_STEPS
from ra.settings import AlternationSettings
from ra.variants import variant
from study.memory.micro_batch import MemoryPlanError, Predictions
from study.runner import amend_plan
from study.runner import plan as planning
from study.runner.plan import DoesNotFitError, PlanError, Timing
from study.runner.settings import StudySettings
from tests.study.runner.test_plan import resolved, steady

ALTERNATION = AlternationSettings("output", 0.5, 100.0)
SPEEDS = {"B": 2.0, "RAALL": 2.0, "RALEARN": 3.0}


@pytest.fixture
def config(a100_config: Config) -> Config:
    return a100_config


class Place:
    """A study of which the plan is made of so many variants, of one speed a step each."""

    def __init__(self, config: Config, folder: Path, equal: bool = False, gib: float = 40.0) -> None:
        self.config, self.folder, self.equal, self.gib = config, folder, equal, gib

    def make(
        self,
        *names: str,
        batch: BatchPlan | None = None,
        margin: float | None = None,
        time_steps: Any = None,
    ) -> dict[str, Any]:
        settings = StudySettings("s", names, 3, self.folder, self.equal)
        timed = time_steps or steady(SPEEDS)
        return planning.make_plan(
            self.config, settings, resolved(self.gib), self.variants(*names), timed, batch, margin
        )

    def variants(self, *names: str) -> Any:
        return {name: variant(name, self.config.model, ALTERNATION) for name in names}

    def add(self, plan: dict[str, Any], *names: str, time_steps: Any = None) -> dict[str, Any]:
        def remake(batch: BatchPlan, margin: float) -> dict[str, Any]:
            return self.make(*names, batch=batch, margin=margin, time_steps=time_steps)

        return amend_plan.with_variants(self.folder, plan, self.variants(*names), remake)


def wsd(config: Config) -> Config:
    optimizer = dataclasses.replace(config.optimizer, schedule="wsd", decay_fraction=0.2)
    return dataclasses.replace(config, optimizer=optimizer)


def on_record(folder: Path, name: str, **schedule: Any) -> None:
    run = folder / "runs" / f"{name}0"
    run.mkdir(parents=True)
    seen = run_record.blank(f"{name}0", name, 0) | {"schedule": {"cut": False} | schedule}
    files.write_json(run / "run.json", seen)


@pytest.mark.parametrize("kept", [True, False])
def test_a_plan_that_is_made_anew_keeps_the_warm_up_that_runs_were_begun_with(
    config: Config, tmp_path: Path, kept: bool
) -> None:
    place = Place(wsd(config), tmp_path)
    first = place.make("B", "RALEARN")["variants"]["B"]
    known = {"warmup_iterations": first["warmup_iterations"]} if kept else {}  # older records have none
    on_record(tmp_path, "B", iterations=first["iterations"], **known)
    slower = place.make("B", "RALEARN", time_steps=steady({"B": 4.0, "RALEARN": 6.0}))
    assert slower["variants"]["B"]["warmup_iterations"] < first["warmup_iterations"]
    learned = dict(slower["variants"]["RALEARN"])
    made = amend_plan.with_counts(slower, amend_plan.schedules_on_record(tmp_path), place.config.optimizer)
    keys = ("iterations", "tokens", "warmup_iterations")
    assert [made["variants"]["B"][key] for key in keys] == [first[key] for key in keys]
    assert made["variants"]["RALEARN"] == learned


def test_a_warm_up_on_record_wins_over_one_that_is_worked_out(config: Config, tmp_path: Path) -> None:
    place = Place(wsd(config), tmp_path)
    plan = place.make("B")
    count = plan["variants"]["B"]["iterations"]
    assert warmup_iterations(count, config.optimizer.warmup_fraction) != 17
    on_record(tmp_path, "B", iterations=count, warmup_iterations=17)
    made = amend_plan.with_counts(plan, amend_plan.schedules_on_record(tmp_path), place.config.optimizer)
    assert made["variants"]["B"]["warmup_iterations"] == 17


def test_a_lost_plan_of_an_extended_study_is_refused_in_a_line(tmp_path: Path) -> None:
    on_record(tmp_path, "B", iterations=20)
    assert amend_plan.schedules_on_record(tmp_path)["B"]["iterations"] == 20
    (tmp_path / "runs" / "B0" / "run-10.json").write_text("{}")
    with pytest.raises(
        PlanError, match=r"plan\.json is gone .*extended \(B0.*right: .*CONFIG_STUDY_NAME"
    ) as it:
        amend_plan.schedules_on_record(tmp_path)
    assert "\n" not in str(it.value)


def test_equal_tokens_holds_for_a_variant_that_is_added(config: Config, tmp_path: Path) -> None:
    place = Place(wsd(config), tmp_path, equal=True)
    before = place.make("B", "RAALL")
    row = dict(before["variants"]["B"])
    assert row["iterations"] == 3600 + WARM_UP_STEPS
    plan = place.add(before, "B", "RAALL", "RALEARN")
    assert plan["variants"]["B"] == plan["variants"]["RAALL"] == row
    added = plan["variants"]["RALEARN"]
    assert [added[key] for key in amend_plan.OF_THE_COUNT[:3]] == [
        row[key] for key in amend_plan.OF_THE_COUNT[:3]
    ]
    assert added["class"] == "learned-output"
    assert added["time_factor"] == 1.5
    assert plan["notes"] == [
        f"RALEARN gets the others' {row['iterations']} iterations (CONFIG_BUDGET_EQUAL_TOKENS=y), which take it "
        "about 10800 s of training where 7200 s were asked for"
    ]
    assert planning.load_plan(tmp_path) == plan


def test_equal_tokens_holds_in_a_plan_that_is_made_anew(config: Config, tmp_path: Path) -> None:
    place = Place(config, tmp_path, equal=True)
    on_record(tmp_path, "B", iterations=3602)
    plan = place.make("B", "RALEARN")
    assert plan["variants"]["B"]["iterations"] < 3602
    made = amend_plan.with_counts(plan, amend_plan.schedules_on_record(tmp_path), config.optimizer)
    assert {row["iterations"] for row in made["variants"].values()} == {3602}


def test_a_variant_that_is_added_is_counted_with_the_margin_that_stands(
    config: Config, tmp_path: Path
) -> None:
    def changing(by: float) -> Any:
        seconds = SPEEDS | {"RALEARN": 3.0}
        return lambda name, batch, budget: Timing([seconds[name] * x for x in [1.0] * 10 + [1 + by] * 10], 1)

    place = Place(config, tmp_path)
    plan = place.make("B", time_steps=changing(0.08))
    free = plan["margin"]
    assert free > 0.03
    added = place.add(plan, "B", "RALEARN", time_steps=changing(0.0))["variants"]["RALEARN"]
    assert added["iterations"] == int(config.budget.max_time_seconds / (3.0 * (1 + free))) + WARM_UP_STEPS


def test_a_variant_that_is_as_fast_as_the_others_is_given_no_more_time(
    config: Config, tmp_path: Path
) -> None:
    place = Place(config, tmp_path, equal=True)
    fast = steady({"B": 2.0, "RALEARN": 1.0})
    plan = place.add(place.make("B"), "B", "RALEARN", time_steps=fast)
    assert plan["variants"]["RALEARN"]["iterations"] == plan["variants"]["B"]["iterations"]
    assert "time_factor" not in plan["variants"]["RALEARN"]
    assert plan["notes"] == []


def test_what_is_added_is_predicted_at_the_micro_batch_that_stands(config: Config, tmp_path: Path) -> None:
    place = Place(config, tmp_path, gib=80.0)
    plan = place.make("B")
    largest = plan["batch"]["micro"]
    assert planning.fall_back(tmp_path, plan, "B0")  # the card had less room than it should
    micro = plan["batch"]["micro"]
    assert micro < largest
    batch = dict(plan["batch"])
    plan = place.add(plan, "B", "RALEARN")
    learned = place.variants("RALEARN")["RALEARN"]
    assert plan["batch"] == batch
    assert plan["variants"]["RALEARN"]["predicted_bytes"] == Predictions(config, resolved(80.0)).peak_bytes(
        learned, micro
    )


def test_a_hungrier_variant_steps_the_standing_micro_batch_down_before_any_run(
    config: Config, tmp_path: Path
) -> None:
    predictions = Predictions(config, resolved())
    rows = Place(config, tmp_path).variants("B", "RALEARN")
    micro = Place(config, tmp_path).make("B")["batch"]["micro"]
    needs = {name: predictions.peak_bytes(row, micro) for name, row in rows.items()}
    assert needs["B"] < needs["RALEARN"]
    place = Place(
        config, tmp_path, gib=(needs["B"] + needs["RALEARN"]) / 2 / 0.9 / 2**30
    )  # B fits, RALEARN does not
    before = place.make("B")
    assert before["batch"]["micro"] == micro
    plan = place.add(before, "B", "RALEARN")
    smaller = plan["batch"]["micro"]
    assert smaller < micro
    assert smaller * plan["batch"]["accumulation"] == 512
    for name, row in rows.items():
        assert plan["variants"][name]["predicted_bytes"] == predictions.peak_bytes(row, smaller)
    assert any(f"RALEARN was added and does not fit at micro-batch {micro}" in note for note in plan["notes"])
    assert planning.load_plan(tmp_path) == plan


def test_a_variant_that_runs_out_of_memory_when_it_is_timed_steps_it_down_too(
    config: Config, tmp_path: Path
) -> None:
    place = Place(config, tmp_path)
    plan = place.make("B")
    micro = plan["batch"]["micro"]

    def time_steps(name: str, batch: BatchPlan, seconds: float) -> Timing:
        if name == "RALEARN" and batch.micro == micro:
            raise DoesNotFitError("out of memory")
        return Timing([SPEEDS[name]] * 20, 1)

    plan = place.add(plan, "B", "RALEARN", time_steps=time_steps)
    assert plan["batch"]["micro"] == micro // 2
    assert any("RALEARN was added" in note for note in plan["notes"])


def test_a_variant_that_does_not_fit_at_all_is_refused_and_the_plan_stands(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(config, tmp_path)
    plan = planning.save_plan(tmp_path, place.make("B"))
    fits = Predictions.fits
    monkeypatch.setattr(
        Predictions, "fits", lambda self, it, micro: it.name != "RALEARN" and fits(self, it, micro)
    )
    with pytest.raises(MemoryPlanError, match=r"RALEARN .*for one sequence") as told:
        place.add(plan, "B", "RALEARN")
    assert "\n" not in str(told.value)
    assert planning.load_plan(tmp_path) == plan
