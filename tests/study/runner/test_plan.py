import dataclasses
import statistics
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.artifacts import run_record
from gpt2.config.batch import BatchPlan
from gpt2.config.config import BudgetConfig, Config
from gpt2.hardware.resolve import TARGETS, ResolvedTarget
from gpt2.system import files
from gpt2.train.trainer import WARM_UP_STEPS
from ra.settings import AlternationSettings
from ra.variants import variant
from study.analysis.timing import told_margin
from study.memory.micro_batch import MemoryPlanError
from study.runner import amend_plan
from study.runner import plan as planning
from study.runner.plan import DoesNotFitError, PlanError, Timing, iteration_counts
from study.runner.settings import StudySettings
from study.runner.status_text import summary

ALTERNATION = AlternationSettings("output", 0.5, 100.0)
NAMES = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")


@pytest.fixture
def config(a100_config: Config) -> Config:
    return a100_config


def resolved(gib: float = 40.0) -> ResolvedTarget:
    row = TARGETS["a100-40g"]
    return ResolvedTarget(row, "cuda:0", row.title, int(gib * 2**30), "bfloat16", "flash", "13.0", "2.13.0")


def make(
    config: Config, directory: Path, time_steps: Any, names: tuple[str, ...] = NAMES, gib: float = 40.0
) -> Any:
    settings = StudySettings("s", names, 3, directory, False)
    variants = {name: variant(name, config.model, ALTERNATION) for name in names}
    plan = planning.make_plan(config, settings, resolved(gib), variants, time_steps)
    return planning.save_plan(directory, plan)


def steady(seconds: dict[str, float]) -> Any:
    return lambda name, batch, budget: Timing([seconds[name]] * 20, 1)


def test_all_variants_get_one_exact_batch_of_512_sequences_on_every_gpu(
    config: Config, tmp_path: Path
) -> None:
    for gib in (24.0, 40.0, 48.0, 80.0, 141.0, 192.0):
        batch = make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0)), gib=gib)["batch"]
        assert batch["effective"] == 512 == batch["micro"] * batch["accumulation"]
        assert batch["block_size"] == 1024


def test_a_time_budget_becomes_counts_and_fixed_patterns_share_theirs(config: Config, tmp_path: Path) -> None:
    timed: list[str] = []

    def time_steps(name: str, batch: BatchPlan, seconds: float) -> Timing:
        timed.append(name)
        return Timing([2.0 if name == "B" else 2.5] * 20, 1)

    plan = make(config, tmp_path, time_steps)
    counts = {name: row["iterations"] for name, row in plan["variants"].items()}
    assert counts["B"] == counts["RAEARLY"] == counts["RALATE"] == counts["RAALL"] == 3600 + WARM_UP_STEPS
    assert counts["RALEARN"] == 2880 + WARM_UP_STEPS
    assert timed == ["B", "RALEARN"] * planning.ROUNDS
    assert planning.load_plan(tmp_path) == plan


@pytest.mark.parametrize(("gib", "together"), [(40.0, True), (4.0, False)])
def test_where_there_is_room_classes_are_timed_step_by_step_in_one_process(
    config: Config, tmp_path: Path, gib: float, together: bool
) -> None:
    asked: list[tuple[str, ...]] = []

    def alone(name: str, batch: BatchPlan, seconds: float) -> Timing:
        asked.append((name,))
        return Timing([2.0] * 20, 1)

    def at_once(names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
        asked.append(tuple(names))
        return {name: Timing([2.0 if name == "B" else 2.5] * 20, None) for name in names}

    settings = StudySettings("s", NAMES, 3, tmp_path, False)
    small = dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro=1))
    variants = {name: variant(name, config.model, ALTERNATION) for name in NAMES}
    plan = planning.make_plan(small, settings, resolved(gib), variants, alone, time_together=at_once)
    assert asked == ([("B", "RALEARN")] if together else [("B",), ("RALEARN",)] * planning.ROUNDS)
    if together:
        assert plan["variants"]["B"]["iterations"] == 3600 + WARM_UP_STEPS
        assert plan["variants"]["RALEARN"]["iterations"] == 2880 + WARM_UP_STEPS
        assert {kind["peak_bytes"] for kind in plan["classes"].values()} == {None}


def test_one_variant_alone_is_timed_in_a_process_of_its_own(config: Config, tmp_path: Path) -> None:
    settings = StudySettings("s", ("B", "RAALL"), 3, tmp_path, False)
    variants = {name: variant(name, config.model, ALTERNATION) for name in ("B", "RAALL")}
    plan = planning.make_plan(
        config, settings, resolved(), variants, steady({"B": 2.0}), time_together=lambda *_: {}
    )
    assert plan["classes"]["standard"]["peak_bytes"] == 1


def test_classes_within_two_percent_share_a_count_and_others_do_not() -> None:
    budget = BudgetConfig(100, 0, 0)
    close = iteration_counts(budget, 1, {"a": 1.0, "b": 1.015}, ["a", "b"], False)
    apart = iteration_counts(budget, 1, {"a": 1.0, "b": 1.03}, ["a", "b"], False)
    assert close["a"] == close["b"]
    assert apart["a"] > apart["b"]


@given(
    seconds=st.floats(0.01, 5),
    limit=st.integers(60, 7200),
    tokens=st.integers(0, 10**6),
    most=st.integers(0, 10**5),
)
def test_the_budget_that_ends_first_decides(seconds: float, limit: int, tokens: int, most: int) -> None:
    per_iteration = 100
    if 0 < tokens < per_iteration:
        tokens = per_iteration
    counts = iteration_counts(BudgetConfig(limit, tokens, most), per_iteration, {"a": seconds}, ["a"], False)
    limits = [int(limit / seconds) + WARM_UP_STEPS]
    limits += [tokens // per_iteration] if tokens else []
    limits += [most] if most else []
    assert counts["a"] == min(limits)


def test_equal_tokens_gives_all_the_slowest_count() -> None:
    counts = iteration_counts(BudgetConfig(100, 0, 0), 1, {"a": 1.0, "b": 2.0}, ["a", "b"], True)
    assert counts == {"a": 50 + WARM_UP_STEPS, "b": 50 + WARM_UP_STEPS}


def test_a_budget_that_is_hardly_a_step_is_refused() -> None:
    with pytest.raises(PlanError, match=r"CONFIG_GPT2_MAX_TIME=3 .*CONFIG_EFFECTIVE_BATCH"):
        iteration_counts(BudgetConfig(3, 0, 0), 1, {"a": 3.0}, ["a"], False)
    with pytest.raises(PlanError, match="less than one iteration"):
        iteration_counts(BudgetConfig(0, 50, 0), 100, {}, ["a"], False)


def test_out_of_memory_while_timing_takes_the_next_divisor_for_all(config: Config, tmp_path: Path) -> None:
    tried: list[tuple[str, int]] = []

    def time_steps(name: str, batch: BatchPlan, seconds: float) -> Timing:
        tried.append((name, batch.micro))
        if name == "RALEARN" and batch.micro > 4:
            raise DoesNotFitError("out of memory")
        return Timing([2.0] * 20, 1)

    batch = make(config, tmp_path, time_steps)["batch"]
    assert batch["micro"] == 4
    assert batch["micro"] * batch["accumulation"] == 512
    assert [micro for _, micro in tried] == sorted((micro for _, micro in tried), reverse=True)


def test_a_model_that_cannot_fit_is_refused_before_anything_runs(config: Config, tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"needs .* GiB for one sequence.*CONFIG_GPT2_MODEL"):
        make(config, tmp_path, steady({}), gib=1.0)


def test_falling_back_keeps_the_effective_batch_and_is_noted(config: Config, tmp_path: Path) -> None:
    plan = make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0)))
    before = plan["batch"]["micro"]
    assert planning.fall_back(tmp_path, plan, "RALEARN0")
    after = planning.load_plan(tmp_path)
    assert after is not None
    assert after["batch"]["micro"] == before // 2
    assert after["batch"]["micro"] * after["batch"]["accumulation"] == 512
    assert "RALEARN0 ran out of memory" in after["notes"][0]
    assert "DROPOUT" not in after["notes"][0]


def test_falling_back_says_so_where_dropout_makes_the_losses_depend_on_the_split(
    config: Config, tmp_path: Path
) -> None:
    plan = make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0)))
    assert planning.fall_back(tmp_path, plan, "RALEARN0", 0.1)
    (note,) = planning.load_plan(tmp_path)["notes"]  # type: ignore[index]
    assert "batch of 512 unchanged; with CONFIG_GPT2_DROPOUT=0.1 other units are dropped" in note


def test_a_variant_that_is_added_later_never_changes_the_counts_that_stand(
    config: Config, tmp_path: Path
) -> None:
    plan = make(config, tmp_path, steady({"B": 2.0}), names=("B", "RAALL"))
    variants = {
        name: variant(name, config.model, ALTERNATION) for name in ("B", "RAALL", "RALATE", "RALEARN")
    }
    fresh = {"batch": plan["batch"], "notes": [],
             "classes": {"standard": {}, "learned-output": {"seconds_per_iteration": 3.0}},
             "variants": {"RALEARN": {"class": "learned-output", "iterations": 7, "tokens": 7}}}  # fmt: skip
    counts = {name: dict(row) for name, row in plan["variants"].items()}
    later = amend_plan.with_variants(tmp_path, plan, variants, lambda batch, margin: fresh)
    assert {name: later["variants"][name] for name in counts} == counts
    assert later["variants"]["RALATE"]["iterations"] == counts["B"]["iterations"]
    assert later["variants"]["RALEARN"]["iterations"] == 7


def test_a_plan_that_is_made_anew_keeps_the_counts_that_runs_were_begun_with(
    config: Config, tmp_path: Path
) -> None:
    make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0)))
    first = planning.load_plan(tmp_path)
    assert first is not None
    began = first["variants"]["RAALL"]["iterations"]
    folder = tmp_path / "runs" / "RAALL0"
    folder.mkdir(parents=True)
    seen = run_record.blank("RAALL0", "RAALL", 0) | {"schedule": {"iterations": began, "cut": False}}
    files.write_json(folder / "run.json", seen)
    settings = StudySettings("s", NAMES, 3, tmp_path, False)
    variants = {name: variant(name, config.model, ALTERNATION) for name in NAMES}
    slower = planning.make_plan(config, settings, resolved(), variants, steady(dict.fromkeys(NAMES, 3.0)))
    assert slower["variants"]["RAALL"]["iterations"] < began
    kept = amend_plan.with_counts(slower, amend_plan.schedules_on_record(tmp_path), config.optimizer)
    row = kept["variants"]["RAALL"]
    assert (row["iterations"], row["tokens"]) == (began, first["variants"]["RAALL"]["tokens"])
    assert kept["variants"]["B"]["iterations"] < began
    assert any("RAALL keeps" in note for note in kept["notes"])
    assert planning.load_plan(tmp_path) == first  # a plan stands once it is saved, and not before


def test_an_unreadable_plan_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match=r"plan.json cannot be read"):
        planning.load_plan(tmp_path)


def test_the_configured_micro_batch_is_taken_as_it_is(config: Config, tmp_path: Path) -> None:
    fixed = dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro=8))
    assert make(fixed, tmp_path, steady(dict.fromkeys(NAMES, 2.0)))["batch"]["micro"] == 8


def test_the_warm_up_of_wsd_is_planned_in_iterations_and_an_extension_leaves_it(
    config: Config, tmp_path: Path
) -> None:
    optimizer = dataclasses.replace(config.optimizer, schedule="wsd", decay_fraction=0.2)
    wsd = dataclasses.replace(config, optimizer=optimizer)
    assert (
        "warmup_iterations" not in make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0)))["variants"]["B"]
    )
    row = make(wsd, tmp_path, steady(dict.fromkeys(NAMES, 2.0)))["variants"]["B"]
    first, warmup = row["iterations"], row["warmup_iterations"]
    assert warmup == round(first * optimizer.warmup_fraction)
    for factor, count in ((Fraction(2), 2 * first), (Fraction(3), 3 * first)):
        planning.extend_row(row, factor)
        assert (row["iterations"], row["warmup_iterations"], row["first_iterations"]) == (
            count,
            warmup,
            first,
        )
        assert row["tokens"] == count * 512 * 1024


def test_a_variant_that_is_added_to_an_extended_plan_is_extended_too(config: Config, tmp_path: Path) -> None:
    plan = make(config, tmp_path, steady({"B": 2.0}), names=("B",)) | {"extended": 2.0}
    variants = {name: variant(name, config.model, ALTERNATION) for name in ("B", "RALEARN")}
    fresh = {
        "batch": plan["batch"],
        "notes": [],
        "classes": {},
        "variants": {"RALEARN": {"class": "learned-output", "iterations": 7, "tokens": 70}},
    }
    later = amend_plan.with_variants(tmp_path, plan, variants, lambda batch, margin: fresh)
    row = later["variants"]["RALEARN"]
    assert (row["iterations"], row["tokens"], row["first_iterations"]) == (14, 140, 7)


STEPS = st.lists(st.floats(0.5, 1.4), min_size=20, max_size=80)  # seconds


@given(STEPS, st.integers(0, 4))
def test_slow_steps_count_in_full_when_steps_are_timed(samples: list[float], hiccups: int) -> None:
    slowed = [max(sample, 1.4) if place < hiccups else sample for place, sample in enumerate(samples)]
    assert planning.steady_mean(slowed) == pytest.approx(statistics.fmean(slowed))


@given(STEPS, st.floats(5.0, 1000.0))
def test_a_stall_counts_as_a_slow_step_however_long_it_is(samples: list[float], stall: float) -> None:
    usual, stalled = planning.steady_mean(samples), planning.steady_mean([*samples, stall])
    assert stalled == pytest.approx(planning.steady_mean([*samples, 5.0]))
    assert usual < stalled < usual + 3 * 1.4 / len(samples)


@given(st.floats(1.0, 1.08), st.sampled_from([1, 4, 10]), st.floats(1.0, 5.0))
def test_the_margin_is_by_how_much_the_speed_changed_within_a_class(
    speed: float, steps: int, slower: float
) -> None:
    """So many steps in PIECE seconds; half of them at another speed. Another class is slower and changes alike."""
    step = 1.001 * planning.PIECE / steps
    samples = [step] * 20 * steps + [speed * step] * 20 * steps
    changed = (speed - 1) / (speed + 1)
    assert planning.speed_margin([samples]) == pytest.approx(changed, rel=0.05, abs=1e-9)
    assert planning.speed_margin([samples, [slower * one for one in samples]]) == pytest.approx(
        changed, rel=0.05, abs=1e-9
    )


@pytest.mark.parametrize("step", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_the_margin_knows_a_change_of_speed_from_noise(step: float, drift: float) -> None:
    """Steps that vary by a twentieth each, of a machine that holds its speed or changes it by 3 % every few pieces."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(20):
        count = max(round(60 / step), 40)
        speed = (
            1 + drift * np.repeat(draw.normal(size=count), max(round(3 * planning.PIECE / step), 1))[:count]
        )
        found.append(planning.speed_margin([list(step * speed * (1 + 0.05 * draw.normal(size=count)))]))
    assert statistics.fmean(found) == pytest.approx(drift, abs=0.012)


def test_the_margin_of_a_stall_and_of_too_little_data() -> None:
    assert planning.speed_margin([[0.5] * 80 + [60.0] + [0.5] * 80]) == 0.0
    assert (
        planning.speed_margin([[1.0, 1.1, 1.0]])
        == planning.speed_margin([[3.0]])
        == planning.speed_margin([])
        == 0.0
    )
    assert planning.speed_margin([[2.0] * 10 + [4.0] * 10]) == planning.MOST_MARGIN


def test_a_machine_whose_speed_changes_gets_fewer_iterations_of_each_class_and_says_so(
    config: Config, tmp_path: Path
) -> None:
    still = make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.08) | {"RALEARN": 3.12}))
    assert (still["margin"], told_margin(still)) == (0.0, [])
    plan = make(
        config,
        tmp_path,
        lambda name, *_: Timing([x * (1.5 if name == "RALEARN" else 1.0) for x in [2.0] * 10 + [2.16] * 10], 1),
    )  # fmt: skip
    assert plan["margin"] == pytest.approx(
        0.04 / 1.04, rel=0.1
    )  # what changes is in part noise from step to step
    assert "leave 3 % of the time limit free" in told_margin(plan)[0]
    assert told_margin(plan)[0] in summary(plan, NAMES, 1, 1)
    for name, row in plan["variants"].items():
        whole = still["variants"][name]["iterations"] - WARM_UP_STEPS
        assert row["iterations"] - WARM_UP_STEPS == pytest.approx(whole / (1 + plan["margin"]), abs=1)
        assert plan["classes"][row["class"]]["seconds_per_iteration"] == pytest.approx(
            3.12 if name == "RALEARN" else 2.08
        )
