import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ra.variants import variant
from runtime.batch_plan import WARM_UP_STEPS, BatchPlan
from runtime.errors import UserError
from runtime.resolved_target import TARGETS, ResolvedTarget
from runtime.settings import AlternationSettings, BudgetConfig, Config
from study import plan_file, planner
from study.plan_file import Plan
from study.planner import iteration_counts
from study.planning.micro_batch import MemoryPlanError
from study.step_timing import ROUNDS, DoesNotFitError, Timing
from study.study_settings import StudySettings
from study.terminal import summary

ALTERNATION = AlternationSettings("output", 0.5, 100.0)
NAMES = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")


@pytest.fixture
def config(a100_config: Config) -> Config:
    """An A100's configuration with two layers: a prediction of memory takes time in proportion to them."""
    return dataclasses.replace(a100_config, model=dataclasses.replace(a100_config.model, layers=2))


def resolved(gib: float = 40.0) -> ResolvedTarget:
    row = TARGETS["a100-40g"]
    return ResolvedTarget(row, "cuda:0", row.title, int(gib * 2**30), "bfloat16", "flash", "13.0", "2.13.0")


def counter(config: Config, settings: StudySettings, variants: Any, gib: float = 40.0) -> Any:
    return functools.partial(planner.count_arms, config, settings, resolved(gib), variants)


def make(
    config: Config,
    directory: Path,
    time_steps: Any,
    names: tuple[str, ...] = NAMES,
    gib: float = 40.0,
    equal_time: bool = False,
) -> Plan:
    settings = StudySettings("s", names, 3, directory, equal_time)
    variants = {name: variant(name, config.model, ALTERNATION) for name in names}
    plan = planner.make_plan(
        config, settings, resolved(gib), counter(config, settings, variants, gib), time_steps
    )
    return plan_file.write(directory, plan)


def timing(seconds: float, peak_bytes: int | None = 1) -> Timing:
    return Timing(((seconds,) * 20,), peak_bytes)


def steady(seconds: dict[str, float]) -> Any:
    return lambda names, batch, budget: {name: timing(seconds[name]) for name in names}


def test_all_variants_get_one_exact_batch_of_512_sequences_on_every_gpu(
    config: Config, tmp_path: Path
) -> None:
    micro = []
    for gib in (3.0, 4.0, 6.0, 8.0, 192.0):
        batch = make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0)), gib=gib).batch
        assert batch.effective == 512 == batch.micro * batch.accumulation
        assert batch.block_size == 1024
        micro.append(batch.micro)
    assert micro == sorted(micro)
    assert len(set(micro)) > 2


def test_with_a_count_steps_are_timed_for_seconds_and_only_in_long_cpu_studies(config: Config) -> None:
    """Timing must not take a large part of a short study, and not wait for a card or a cluster."""
    settings = StudySettings("s", NAMES, 3, Path(), False)
    counted = dataclasses.replace(config, budget=BudgetConfig(0, 0, 100))
    short = dataclasses.replace(config, budget=BudgetConfig(0, 10**3, 100))
    cpu = dataclasses.replace(resolved(), device="cpu")
    assert planner.timing_seconds(counted, settings, cpu) == planner.COUNT_SECONDS
    assert planner.timing_seconds(config, settings, cpu) == planner.TIMING_MOST
    untimed = ((short, settings, cpu), (counted, settings, resolved()),
               (counted, dataclasses.replace(settings, executor="slurm"), cpu))  # fmt: skip
    assert not any(planner.timing_seconds(*case) for case in untimed)


def test_a_count_from_step_times_beside_other_work_has_a_note(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner.os, "cpu_count", lambda: 2)
    loads = []
    for load in (1.9, 16.3):
        monkeypatch.setattr(planner.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        loads.append(planner.load_note(config))
        assert not planner.load_note(dataclasses.replace(config, budget=BudgetConfig(0, 0, 100)))
    assert not loads[0]
    assert "load of 16 on 2 CPUs" in loads[1]


@pytest.mark.parametrize("equal_time", [False, True])
def test_a_time_limit_becomes_one_count_or_at_equal_time_one_for_each_class(
    config: Config, tmp_path: Path, equal_time: bool
) -> None:
    timed: list[str] = []

    def time_steps(names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
        timed.extend(names)
        return {name: timing(2.0 if name == "B" else 2.5) for name in names}

    plan = make(config, tmp_path, time_steps, equal_time=equal_time)
    counts = {name: row.iterations for name, row in plan.variants.items()}
    fixed = {counts[name] for name in NAMES[:-1]}
    assert fixed == {(3600 if equal_time else 2880) + WARM_UP_STEPS}
    assert counts["RALEARN"] == 2880 + WARM_UP_STEPS
    assert timed == ["B", "RALEARN"]
    assert plan.budget.equal_time == equal_time
    assert plan_file.read(tmp_path) == plan


@pytest.mark.parametrize(
    ("names", "slower", "baseline"),
    [
        (("RALEARN", "B"), "learned-output", "standard"),
        (("RALEARN", "RA:1"), "standard", "learned-output"),
    ],
)
def test_step_time_ratios_are_to_b_or_to_the_first_variant(
    config: Config, tmp_path: Path, names: tuple[str, ...], slower: str, baseline: str
) -> None:
    seconds = {name: 2.5 if name == "RALEARN" else 2.0 for name in names}
    ratios = make(config, tmp_path, steady(seconds), names=names).step_time_ratios
    assert list(ratios) == [slower]
    assert ratios[slower].to == baseline
    assert ratios[slower].ratio == pytest.approx(1.25 if slower == "learned-output" else 0.8)


def test_without_a_time_limit_no_step_is_timed(config: Config, tmp_path: Path) -> None:
    counted = dataclasses.replace(config, budget=BudgetConfig(0, 0, 30))
    plan = make(counted, tmp_path, None)
    assert (dict(plan.classes), dict(plan.step_time_ratios)) == ({}, {})
    assert {row.iterations for row in plan.variants.values()} == {30}


@pytest.mark.parametrize(("gib", "short"), [(40.0, False), (4.0, False), (40.0, True)])
def test_with_enough_memory_classes_are_timed_step_by_step_in_one_process(
    config: Config, tmp_path: Path, gib: float, short: bool
) -> None:
    """Classes that do not fit together do not lower the micro-batch, which would be another experiment."""
    asked: list[tuple[str, ...]] = []

    def time_steps(names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
        asked.append(tuple(names))
        assert batch.micro == 1
        if short and len(names) > 1:
            raise DoesNotFitError
        return {name: timing(2.0 if name == "B" else 2.5, None) for name in names}

    settings = StudySettings("s", NAMES, 3, tmp_path, False)
    small = dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro=1))
    variants = {name: variant(name, config.model, ALTERNATION) for name in NAMES}
    count = counter(small, settings, variants, gib)
    plan = planner.make_plan(small, settings, resolved(gib), count, time_steps)
    alone = [("B",), ("RALEARN",)] * ROUNDS
    assert asked == ([("B", "RALEARN")] if gib == 40.0 else []) + (alone if gib < 40.0 or short else [])
    if asked == [("B", "RALEARN")]:
        assert {row.iterations for row in plan.variants.values()} == {2880 + WARM_UP_STEPS}
        assert {kind.peak_bytes for kind in plan.classes.values()} == {None}


def test_a_single_variant_is_timed_in_a_separate_process(config: Config, tmp_path: Path) -> None:
    settings = StudySettings("s", ("B", "RAALL"), 3, tmp_path, False)
    variants = {name: variant(name, config.model, ALTERNATION) for name in ("B", "RAALL")}
    plan = planner.make_plan(
        config,
        settings,
        resolved(),
        counter(config, settings, variants),
        steady({"B": 2.0}),
    )
    assert plan.classes["standard"].peak_bytes == 1


def test_at_equal_time_classes_within_two_percent_share_a_count_and_others_do_not() -> None:
    budget = BudgetConfig(100, 0, 0)
    close = iteration_counts(budget, 1, {"a": 1.0, "b": 1.015}, ["a", "b"], True)
    apart = iteration_counts(budget, 1, {"a": 1.0, "b": 1.03}, ["a", "b"], True)
    assert close["a"] == close["b"]
    assert apart["a"] > apart["b"]


@given(
    seconds=st.floats(0.01, 5),
    limit=st.integers(60, 7200),
    tokens=st.integers(0, 10**6),
    most=st.integers(0, 10**5),
)
def test_the_smallest_budget_gives_the_count(seconds: float, limit: int, tokens: int, most: int) -> None:
    per_iteration = 100
    if 0 < tokens < per_iteration:
        tokens = per_iteration
    counts = iteration_counts(BudgetConfig(limit, tokens, most), per_iteration, {"a": seconds}, ["a"], False)
    limits = [int(limit / seconds) + WARM_UP_STEPS]
    limits += [tokens // per_iteration] if tokens else []
    limits += [most] if most else []
    assert counts["a"] == min(limits)


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 5), min_size=1), st.integers(60, 7200))
def test_all_arms_get_the_count_of_the_slowest_one_and_at_equal_time_at_least_that(
    seconds: dict[str, float], limit: int
) -> None:
    budget, classes = BudgetConfig(limit, 0, 0), sorted(seconds)
    same = iteration_counts(budget, 1, seconds, classes, False)
    assert set(same.values()) == {int(limit / max(seconds.values())) + WARM_UP_STEPS}
    unequal = iteration_counts(budget, 1, seconds, classes, True)
    for cost in classes:
        assert unequal[cost] >= same[cost]
        spent = (unequal[cost] - WARM_UP_STEPS) * seconds[cost]
        assert spent <= 1.02 * limit


def test_a_budget_of_less_than_a_few_steps_is_refused() -> None:
    with pytest.raises(UserError, match=r"CONFIG_GPT2_MAX_TIME=3 .*fix: .*CONFIG_EFFECTIVE_BATCH"):
        iteration_counts(BudgetConfig(3, 0, 0), 1, {"a": 3.0}, ["a"], False)
    with pytest.raises(UserError, match="less than one iteration"):
        iteration_counts(BudgetConfig(0, 50, 0), 100, {}, ["a"], False)


def test_out_of_memory_during_timing_selects_the_next_divisor_for_all(config: Config, tmp_path: Path) -> None:
    tried: list[int] = []

    def time_steps(names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
        tried.append(batch.micro)
        if "RALEARN" in names and batch.micro > 8:
            raise DoesNotFitError("out of memory")
        return {name: timing(2.0) for name in names}

    batch = make(config, tmp_path, time_steps).batch
    assert batch.micro == 8
    assert batch.micro * batch.accumulation == 512
    assert tried == sorted(tried, reverse=True)


def test_a_model_that_never_fits_is_refused_before_any_run(config: Config, tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"needs .* GiB for one sequence.*CONFIG_GPT2_MODEL"):
        make(config, tmp_path, steady({}), gib=1.0)


def test_a_smaller_micro_batch_leaves_the_effective_batch_unchanged_and_is_noted(
    config: Config, tmp_path: Path
) -> None:
    plan = make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0)))
    after = planner.smaller_batch(plan, "RALEARN0")
    assert after is not None
    assert after.batch.micro == plan.batch.micro // 2
    assert after.batch.micro * after.batch.accumulation == 512
    assert "RALEARN0 ran out of memory" in after.notes[0]
    assert "DROPOUT" not in after.notes[0]
    assert {row.predicted_bytes for row in after.variants.values()} == {None}
    one = plan.replace(batch=BatchPlan(512, 1, 512, 1, 1024))
    assert planner.smaller_batch(one, "RALEARN0") is None


def test_with_dropout_a_smaller_micro_batch_has_a_note_on_the_losses(config: Config, tmp_path: Path) -> None:
    plan = planner.smaller_batch(make(config, tmp_path, steady(dict.fromkeys(NAMES, 2.0))), "RALEARN0", 0.1)
    assert plan
    assert (
        "512 does not change. With CONFIG_GPT2_DROPOUT=0.1 the micro-batch changes the dropout"
        in plan.notes[0]
    )


def test_the_configured_micro_batch_is_used_unchanged(config: Config, tmp_path: Path) -> None:
    fixed = dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro=8))
    assert make(fixed, tmp_path, steady(dict.fromkeys(NAMES, 2.0))).batch.micro == 8


def test_the_summary_gives_the_common_count_or_the_count_of_each_variant(
    config: Config, tmp_path: Path
) -> None:
    seconds = {name: 2.5 if name == "RALEARN" else 2.0 for name in NAMES}
    assert "iterations: 2882 for every variant" in summary(
        make(config, tmp_path, steady(seconds)), NAMES, 1, 1, None
    )
    unequal = make(config, tmp_path, steady(seconds), equal_time=True)
    assert "B 3602, RAEARLY 3602, RALATE 3602, RAALL 3602, RALEARN 2882" in summary(
        unequal, NAMES, 1, 1, None
    )
