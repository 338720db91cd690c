"""The rates of CONFIG_LEARNING_RATES, the arms that they need, and the choice."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ra.arms import control_arms, parse_arm
from runtime.dotconfig import ConfigError, Symbols, parse_lines
from runtime.errors import UserError
from study.study_settings import StudySettings, read_rates
from study.tuned_rates import (
    FILE,
    FOLDER,
    at_rate,
    choose,
    edge,
    judged_names,
    most_judged,
    read_choice,
    tuning_arms,
)
from tests.checked_files import write_checked
from tests.study.sample_records import a_record, edit

ARMS = ("B", "RAALL", "RALEARN", "GATED", "B+WIDTH=match:RALEARN")
GRID = ("3e-4", "6e-4", "1.2e-3")
RATES = ("1e-3", "2e-3")


def read(text: str, variants: Sequence[str] = ARMS) -> tuple[str, ...]:
    return read_rates(Symbols("c", parse_lines(f'CONFIG_LEARNING_RATES="{text}"\n', "c")), variants)


def test_the_rates_are_sorted_by_value_and_retain_their_spelling() -> None:
    assert read("1.2e-3 3e-4 0.0006") == ("3e-4", "0.0006", "1.2e-3")
    assert read("") == read("  ") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1e-3", "has one rate"),
        ("1e-3 0.001", "1e-3 and 0.001, which are one rate"),
        ("1e-3 0", "has 0, no number in (0, 1]"),
        ("1e-3 1.5", "has 1.5, no number"),
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


@given(st.dictionaries(st.sampled_from(ARMS), st.sampled_from(GRID), min_size=1))
def test_the_judged_study_has_what_each_verdict_compares(rates: dict[str, str]) -> None:
    names, controls = list(rates), control_arms(rates)
    rates |= dict.fromkeys(controls, rates[controls[0]]) if controls else {}
    needed = {at_rate(name, rates[name]) for name in names}
    for name in names if controls else ():
        needed |= {at_rate(name, rates[controls[0]]), *(at_rate(one, rates[name]) for one in controls)}
    found = judged_names(names, rates)
    assert (set(found), len(found)) == (needed, len(needed))
    assert needed <= set(tuning_arms(names, GRID))


@pytest.mark.parametrize("names", [ARMS[:3], ARMS[:4], ARMS, ARMS[2:]])
@pytest.mark.parametrize("grid", [GRID[:2], GRID])
def test_the_most_judged_arms_are_those_of_the_choice_that_needs_most(
    names: tuple[str, ...], grid: tuple[str, ...]
) -> None:
    groups = [control_arms(names), *([name] for name in names if not parse_arm(name).is_control)]
    needed = []
    for choice in itertools.product(grid, repeat=len(groups)):
        rates = {name: rate for group, rate in zip(groups, choice, strict=True) for name in group}
        needed.append(len(judged_names(names, rates)))
    assert len(most_judged(names, grid)) == max(needed)


class Place:
    """A finished study of rates. losses: (arm, rate) -> loss at each tuning seed."""

    def __init__(self, folder: Path, losses: Mapping[tuple[str, str], Sequence[float]]) -> None:
        names = tuple(dict.fromkeys(name for name, _ in losses))
        self.settings = StudySettings(
            "s", names, 4, folder, False, rates=RATES, tuning_seeds=len(next(iter(losses.values())))
        )
        self.folder = folder / "s" / FOLDER
        for (name, rate), values in losses.items():
            for number, loss in enumerate(values):
                record = a_record(at_rate(name, rate), 1000 + number, loss)
                (self.folder / "runs" / record["run"]).mkdir(parents=True)
                write_checked(self.folder / "runs" / record["run"] / "run.json", record)

    def choose(self) -> dict[str, str]:
        choice = choose(self.settings)
        assert read_choice(self.settings.directory) == choice
        return {name: one.rate for name, one in choice.arms.items()}


def losses(*rows: tuple[str, Sequence[float], Sequence[float]]) -> dict[tuple[str, str], Sequence[float]]:
    return {(name, rate): row for name, *pair in rows for rate, row in zip(RATES, pair, strict=True)}


THREE = losses(
    ("B", (3.0, 3.1), (3.2, 3.3)), ("RAALL", (3.3, 3.2), (3.2, 3.1)), ("RALEARN", (3.1, 3.2), (3.0, 2.9))
)


def test_the_choice_is_the_lowest_mean_and_the_control_arms_share_it(tmp_path: Path) -> None:
    place = Place(tmp_path, THREE)
    assert place.choose() == {"B": "1e-3", "RAALL": "1e-3", "RALEARN": "2e-3"}  # RAALL alone: 2e-3
    choice = read_choice(place.settings.directory)
    assert choice
    assert choice.arms["RALEARN"].losses == {"1e-3": pytest.approx(3.15), "2e-3": pytest.approx(2.95)}
    assert choice.seeds == (1000, 1001)


def test_a_rate_at_which_a_run_diverged_is_not_eligible(tmp_path: Path) -> None:
    place = Place(tmp_path, THREE)
    for name in (
        "RALEARN+LR=2e-3.1001",
        "RAALL+LR=1e-3.1000",
    ):  # of one control arm: not for the others either
        edit(place.folder, name, status="failed", error="NotFiniteError: loss nan")
    assert place.choose() == {"B": "2e-3", "RAALL": "2e-3", "RALEARN": "1e-3"}
    for name in ("RALEARN+LR=1e-3.1001", "RALEARN+LR=2e-3.1000"):
        edit(place.folder, name, status="failed", error="NotFiniteError: loss nan")
    (place.folder / FILE).unlink()
    edit(place.folder, "B+LR=2e-3.1000", schedule={"cut": True})  # nor is one at which a run was cut short
    with pytest.raises(UserError, match="B has no finite loss"):
        place.choose()


@pytest.mark.parametrize("damage", ["failed", "altered", "missing"])
def test_a_tuning_run_that_does_not_count_defers_the_choice(tmp_path: Path, damage: str) -> None:
    place = Place(tmp_path, THREE)
    path = place.folder / "runs/B+LR=1e-3.1000/run.json"
    if damage == "failed":
        edit(place.folder, "B+LR=1e-3.1000", status="failed", error="killed by signal 9")
    elif damage == "altered":
        path.write_text(path.read_text().replace('"loss": ', '"loss": 1', 1))
    else:
        path.unlink()
    with pytest.raises(UserError, match=r"B\+LR=1e-3.1000 does not count"):
        place.choose()
    assert read_choice(place.settings.directory) is None


def test_a_choice_stays_when_an_arm_is_added_and_other_rates_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path, losses(("B", (3.0,), (3.2,))))
    assert place.choose() == {"B": "1e-3"}
    more = Place(
        tmp_path / "more",
        losses(("B", (9.0,), (3.2,)), ("RAALL", (3.3,), (3.0,)), ("RALEARN", (3.1,), (3.0,))),
    )
    (place.folder / FILE).rename(more.folder / FILE)
    assert more.choose() == {"B": "1e-3", "RAALL": "1e-3", "RALEARN": "2e-3"}
    more.settings = dataclasses.replace(more.settings, rates=GRID)
    with pytest.raises(UserError, match="chose among 1e-3 2e-3; fix: "):
        more.choose()


def test_a_damaged_choice_is_named(tmp_path: Path) -> None:
    place = Place(tmp_path, THREE)
    place.choose()
    path = place.folder / FILE
    path.write_text(path.read_text().replace("1e-3", "2e-3", 1))
    with pytest.raises(UserError, match=r"choice.json was altered.*fix: delete it"):
        place.choose()


def test_the_next_rate_beyond_an_edge_continues_the_grid() -> None:
    assert [edge(rate, GRID) for rate in GRID] == ["1.5e-4", "", "2.4e-3"]
    assert edge("1", ("0.5", "1")) == ""
