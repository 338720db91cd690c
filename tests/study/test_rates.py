"""The settings of the rates, the runs that they need, and the choice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ra.arms import control_arms, parse_arm
from runtime.dotconfig import ConfigError, Symbols, parse_lines
from runtime.errors import UserError
from study.plan_file import LearningRates
from study.study_settings import (
    FIRST_TUNING_SEED,
    choose,
    control_rate,
    edge,
    judged_runs,
    mean_losses,
    most_runs,
    read_rates,
    tuning_runs,
)

ARMS = ("B", "RAALL", "RALEARN", "GATED", "B+WIDTH=match:RALEARN")
GRID = ("3e-4", "6e-4", "1.2e-3")


def read(text: str, variants: Sequence[str] = ARMS) -> LearningRates | None:
    lines = f'CONFIG_LEARNING_RATES="{text}"\nCONFIG_TUNING_SEEDS=3\n'
    return read_rates(Symbols("c", parse_lines(lines, "c")), variants)


def test_the_rates_are_sorted_by_value_and_retain_their_spelling() -> None:
    assert read("1.2e-3 3e-4 0.0006") == LearningRates(("3e-4", "0.0006", "1.2e-3"), 3)


def test_without_rates_nothing_is_tuned() -> None:
    assert read("") is read("  ") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1e-3", "has one rate"),
        ("1e-3 0.001", "1e-3 and 0.001, which are one rate"),
        ("1e-3 0", "has 0, no number in (0, 1]"),
        ("1e-3 1.5", "has 1.5, no number"),
        ("1e-3 -2e-3", "has -2e-3, no number"),
        ("1e-3 nan", "has nan, no number"),
        ("1e-3 1e+0", "has 1e+0, no number"),
        ("1e-3,2e-3 1e-4", "has 1e-3,2e-3, no number"),
    ],
)
def test_rates_that_cannot_be_tuned_are_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert says in str(caught.value)
    assert "; fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_arm_with_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"RALEARN\+LR=1e-3 has one"):
        read("1e-3 2e-3", ("B", "RALEARN+LR=1e-3"))


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_with_a_rate_is_that_arm_at_that_rate(name: str) -> None:
    arm = parse_arm(name).with_rate("6e-4")
    assert dict(arm.recipe) == {"learning_rate": 6e-4}
    assert arm.model_name == name
    assert (arm.without_rate.name, arm.rate, parse_arm(name).rate) == (name, "6e-4", "")


Losses = st.lists(st.floats(1.0, 9.0), min_size=len(GRID), max_size=len(GRID))


@given(st.dictionaries(st.sampled_from(ARMS), Losses, min_size=1), st.integers(1, 30))
def test_the_needed_runs_hold_what_each_verdict_compares(table: dict[str, list[float]], seeds: int) -> None:
    names = list(table)
    tuning = {
        name: {rate: [loss] for rate, loss in zip(GRID, row, strict=True)} for name, row in table.items()
    }
    rates = choose(tuning, LearningRates(GRID, 1))
    runs, common = judged_runs(names, seeds, rates), control_rate(rates)
    assert len(set(runs)) == len(runs)
    assert [seed for _, seed in runs] == sorted(seed for _, seed in runs)
    controls = control_arms(names)

    def at(name: str, rate: str) -> set[tuple[str, int]]:
        return {(f"{name}+LR={rate}", seed) for seed in range(seeds)}

    needed = set().union(*(at(name, rates.chosen[name]) for name in names))
    for name in set(names) - set(controls) if controls else set():
        needed |= at(name, common).union(*(at(other, rates.chosen[name]) for other in controls))
    assert set(runs) == needed
    assert not set(runs) & set(tuning_runs(names, rates))
    assert len(runs) + len(tuning_runs(names, rates)) <= len(most_runs(names, seeds, rates))


@pytest.mark.parametrize("names", [ARMS[:3], ARMS[:4], ARMS, ARMS[2:]])
@pytest.mark.parametrize("grid", [GRID[:2], GRID])
def test_the_most_runs_are_those_of_the_choice_that_needs_most(
    names: tuple[str, ...], grid: tuple[str, ...]
) -> None:
    groups = [
        control_arms(names),
        *([n] for n in names if not parse_arm(n).is_control),
    ]
    rates = LearningRates(grid, 1)
    needed = []
    for choice in itertools.product(grid, repeat=len(groups)):
        chosen = {name: rate for group, rate in zip(groups, choice, strict=True) for name in group}
        needed.append(len(judged_runs(names, 2, rates.replace(chosen=chosen))))
    assert len(most_runs(names, 2, rates)) == len(tuning_runs(names, rates)) + max(needed)


def test_tuning_seeds_are_above_every_judged_seed() -> None:
    runs = tuning_runs(("B", "RALEARN"), LearningRates(("1e-3", "2e-3"), 2))
    assert len(runs) == 8
    assert {seed for _, seed in runs} == {1000, 1001}
    assert FIRST_TUNING_SEED >= 1000  # the range of CONFIG_SEEDS ends at 1000, so its last seed is 999


@given(st.dictionaries(st.sampled_from(ARMS), st.lists(Losses, min_size=2, max_size=2), min_size=2))
def test_the_choice_is_the_lowest_mean_and_the_control_arms_share_it(
    table: dict[str, list[list[float]]],
) -> None:
    tuning = {
        name: {rate: [seeds[0][k], seeds[1][k]] for k, rate in enumerate(GRID)}
        for name, seeds in table.items()
    }
    chosen = choose(tuning, LearningRates(GRID, 2)).chosen
    controls = control_arms(table)
    for name in table:
        together = controls if name in controls else [name]
        means = [
            math.fsum(loss for other in together for loss in tuning[other][rate]) / len(together)
            for rate in GRID
        ]
        assert means[GRID.index(chosen[name])] == pytest.approx(min(means))
    assert len({chosen[name] for name in controls}) <= 1


def test_a_rate_at_which_one_run_has_no_loss_is_not_eligible() -> None:
    rates = LearningRates(("1e-3", "2e-3"), 2)
    lower: list[float | None] = [1.0, None]
    table = {"RALEARN": {"1e-3": [3.0, 3.0], "2e-3": lower}, "B": {"1e-3": [2.0, 2.0], "2e-3": [1.0, 1.0]}}
    assert mean_losses({"RALEARN": table["RALEARN"]}, rates) == {"1e-3": 3.0, "2e-3": None}
    assert choose(table, rates).chosen == {"RALEARN": "1e-3", "B": "2e-3"}
    # of one control arm: not for the others either
    table |= {"RAALL": {"1e-3": [2.0, 2.0], "2e-3": lower}}
    assert choose(table, rates).chosen["B"] == "1e-3"
    with pytest.raises(UserError, match="RALEARN has no finite loss"):
        choose({"RALEARN": {"1e-3": [None, 1.0], "2e-3": lower}}, rates)


def test_a_choice_stays_when_an_arm_is_added() -> None:
    rates = LearningRates(("1e-3", "2e-3"), 1, {"B": "1e-3"})
    table = {name: {"1e-3": [2.0], "2e-3": [1.0]} for name in ("B", "RAALL", "RALEARN")}
    assert choose(table, rates).chosen == {"B": "1e-3", "RAALL": "1e-3", "RALEARN": "2e-3"}


def test_the_next_rate_beyond_an_edge_continues_the_grid() -> None:
    rates = LearningRates(GRID, 1)
    assert (edge("3e-4", rates), edge("6e-4", rates), edge("1.2e-3", rates), edge("", rates)) == (
        "1.5e-4", "", "2.4e-3", "",
    )  # fmt: skip
    assert edge("1", LearningRates(("0.5", "1"), 1)) == ""
