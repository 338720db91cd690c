"""Test the grammar of arms: what is parsed, what is refused, and which names mean one arm."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ra import arms
from ra.arms import (
    KEYS,
    PATTERNS,
    RECIPE,
    VariantError,
    control_groups,
    controls_of,
    known_arm,
    parse_arm,
    published_variants,
    refuse_equal_arms,
)
from runtime.run_record import run_name
from runtime.settings import RECIPE_INTERVALS

FILES = published_variants()
ATTENTIONS = [*PATTERNS, *FILES, "RA:0-1,3"]
NUMBERS = {"LR": "1e-3", "WD": "0", "BETA2": "0.95", "WARMUP": ".5"}
VALUES = {
    "AQN": "qerl",
    "NORM": "gated",
    "MLP": "window",
    "POSITION": "qknorm",
    "WIDTH": "match:RALEARN",
    **NUMBERS,
}
modified = st.lists(st.sampled_from(KEYS), unique=True).map(
    lambda keys: [f"{key}={VALUES[key]}" for key in keys]
)


def test_the_sample_values_cover_every_modifier() -> None:
    assert set(VALUES) == set(KEYS)
    assert set(RECIPE.values()) <= set(RECIPE_INTERVALS)


@given(st.sampled_from([name for name in ATTENTIONS if name != "RALEARN"]), modified)
def test_every_combination_of_modifiers_is_parsed_and_keeps_its_name(
    attention: str, modifiers: list[str]
) -> None:
    name = "+".join([attention, *modifiers])
    arm = parse_arm(name)
    assert (arm.name, arm.attention) == (name, attention)
    numbers = {key: value for key, value in NUMBERS.items() if f"{key}={value}" in modifiers}
    assert dict(arm.recipe) == {RECIPE[key]: float(value) for key, value in numbers.items()}
    assert (arm.match is not None) == ("WIDTH=match:RALEARN" in modifiers)
    assert parse_arm(arm.model_name).recipe == ()
    assert parse_arm(arm.parts_name).match is None
    assert (arm.without_noise.noise, arm.without_rate.rate) == (None, "")
    assert arm.with_rate("2e-3").without_rate == arm.without_rate
    assert arm.with_rate("2e-3").rate == "2e-3"
    assert arm.is_control == (set(modifiers) <= {"LR=1e-3"} and attention not in ("RALEARN", *FILES))


def test_a_function_class_is_of_the_arms_with_w_q_and_w_k_renamed_at_one_recipe() -> None:
    for suffix in ("", "+LR=1e-3", "+NORM=rms", "+AQN=mild", "+WD=0+LR=1e-3"):
        arms = [f"{name}{suffix}" for name in ("B", "RAEARLY", "RALATE", "RAALL", "RAALT", "RA:5-7")]
        assert len({parse_arm(name).function_class for name in arms}) == 1
    others = ("B", "B+LR=1e-3", "B+LR=2e-3", "B+WD=0", "B+NORM=rms", "B+WIDTH=match:RALEARN", "B+AQN=mild")
    others += ("RALEARN", "RALEARN+LR=1e-3", "GONE", "GONE+NORM=gone")
    assert len({parse_arm(name).function_class for name in others}) == len(others)
    assert parse_arm("B+LR=1e-3").function_class == parse_arm("RAALL+LR=.001").function_class
    controls = ["B", "RAALL", "B+LR=1e-3", "RAALL+LR=.001", "B+LR=2e-3"]
    assert control_groups([*controls, *others[3:]]) == [controls[:2], controls[2:4], controls[4:]]
    for name in ("RALEARN+LR=1e-3", "B+LR=.001", "B+WD=0+LR=1e-3"):
        assert controls_of(name, [*controls, *others[3:]]) == controls[2:4]


TAKES_APART = re.compile(
    r"""partition\("\+"|split\("\+"|startswith\("(RA:|\+|AQN|LR|WIDTH)|removeprefix\("(RA:|LR=)|f?"[^"]*\+LR=["{]"""
)
MAY = {
    "ra/arms.py",
    "runtime/run_record.py",  # the folder of a run
    "study/kconfig_commands.py",  # a defconfig with its fragments
}


def test_no_other_file_takes_a_name_apart() -> None:
    root = Path(arms.__file__).parents[1]
    rooms = ("ra", "gpt2", "runtime", "grpo", "study", "scripts", "bench")
    found = {
        str(path.relative_to(root))
        for room in rooms
        for path in (root / room).rglob("*.py")
        if TAKES_APART.search(path.read_text())
    }
    assert found - MAY == set()


@given(modified)
def test_the_order_of_modifiers_and_the_spelling_of_numbers_do_not_make_another_arm(
    modifiers: list[str],
) -> None:
    first = "+".join(["B", *modifiers])
    for order in itertools.islice(itertools.permutations(modifiers), 6):
        other = "+".join(["B", *order]).replace("LR=1e-3", "LR=0.001")
        assert parse_arm(other).meaning == parse_arm(first).meaning
        with pytest.raises(VariantError, match=r"are one arm|twice"):
            refuse_equal_arms([first, "RAALL", other])


def test_arms_of_one_meaning_are_refused_by_name() -> None:
    with pytest.raises(VariantError, match=r"B\+LR=1e-3 and B\+LR=\.001 are one arm; fix: remove one"):
        refuse_equal_arms(["B+LR=1e-3", "B+LR=.001"])
    for one, other in (("RMS", "B+NORM=rms"), ("ROTARY+NORM=rms", "RMS+POSITION=rotary")):
        with pytest.raises(VariantError, match="are one arm"):
            refuse_equal_arms([one, other])
    refuse_equal_arms(
        ["B", "RMS", "ROTARY", "GATED", "GATED+NORM=rms", "RMS+MLP=swiglu", "SWIGLU", "RALEARN"]
    )
    refuse_equal_arms(
        ["B", "B+LR=1e-3", "B+LR=2e-3", "B+WD=1e-3", "B+WIDTH=match:RALEARN", "B+WIDTH=flops:RALEARN"]
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("B+", r"\+ is not a modifier; fix: ATTENTION"),
        ("B+NROM=rms", r"did you mean NORM=\.\.\.\?"),
        ("B+LR=1e-3+LR=2e-3", "LR is given twice"),
        ("B+LR=0", r"LR=0 is not a number in \(0, 1\]"),
        ("B+BETA2=1", r"BETA2=1 is not a number in \[0, 1\)"),
        ("B+NORM=none", "there is no part none; fix: NORM= takes a file"),
        ("B+WIDTH=260", "WIDTH=260 is malformed"),
        ("B+WIDTH=match:RALERN", "did you mean RALEARN"),
        ("+LR=1e-3", "is not a variant"),
    ],
)
def test_a_malformed_arm_is_refused_with_its_fix(name: str, says: str) -> None:
    with pytest.raises(VariantError, match=says) as caught:
        known_arm(name, 4)
    assert "fix:" in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.lists(st.tuples(st.sampled_from(ATTENTIONS), modified), min_size=2, max_size=2, unique_by=str),
    st.data(),
)
def test_two_runs_never_share_a_folder(pairs: list[tuple[str, list[str]]], data: st.DataObject) -> None:
    first, second = ("+".join([attention, *modifiers]) for attention, modifiers in pairs)
    seeds = data.draw(st.tuples(st.integers(0, 2000), st.integers(0, 2000)))
    assert run_name(first, seeds[0]) != run_name(second, seeds[1])
    assert "/" not in run_name(first, seeds[0])
