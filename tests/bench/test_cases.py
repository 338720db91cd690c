"""Selection of shapes and cases by name."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case_step import model_and_parts
from bench.cases import SHAPES, Sizes, arm_of, find_shapes, select_cases
from gpt2.system.errors import UserError

CASES = [case for shape in SHAPES["card"] for case in shape.cases]


@given(st.sets(st.sampled_from(CASES), min_size=1))
def test_cases_are_selected_by_name_and_micro_batch_in_their_order(wanted: set[tuple[str, int]]) -> None:
    (shape,) = select_cases(SHAPES["card"], [f"{case}@{micro}" for case, micro in wanted])
    assert shape.cases == tuple(case for case in CASES if case in wanted)
    (whole,) = SHAPES["card"]
    assert replace(shape, cases=whole.cases) == whole


def test_a_name_alone_is_a_case_at_all_its_micro_batches_and_no_name_is_all_cases() -> None:
    (shape,) = select_cases(SHAPES["card"], ["B", "RALEARN:hard"])
    assert shape.cases == (("B", 12), ("B", 32), ("RALEARN:hard", 32), ("B", 64))
    assert select_cases(SHAPES["cpu"], []) == list(SHAPES["cpu"])
    (small,) = select_cases(SHAPES["cpu"], ["B@12"])  # a shape without a selected case is skipped
    assert (small.name, small.cases) == ("6x384-t256", (("B", 12),))


def test_a_case_with_options_of_the_step_has_the_micro_batches_of_the_case() -> None:
    names = ["B@64", "B+bf16@64", "B+chunk32k+bf16@64", "RALEARN+bf16"]
    (shape,) = select_cases(SHAPES["card"], names)
    assert shape.cases == (
        ("RALEARN+bf16", 32),
        *((case, 64) for case in ("B", "B+bf16", "B+chunk32k+bf16")),
    )


def test_any_arm_is_a_case_at_the_micro_batches_of_the_baseline() -> None:
    arms = [
        "GATED",
        "RA:0-2,5+LR=1e-3",
        "B+WIDTH=match:RALEARN",
        "RALEARN:hard+WD=0+bf16",
        "RALEARN+WIDTH=flops+bf16@32",
    ]
    (shape,) = select_cases(SHAPES["card"], arms)
    at_all = [(arm, micro) for micro in (12, 32, 64) for arm in arms[:3]]
    assert sorted(shape.cases) == sorted([*at_all, (arms[3], 32), ("RALEARN+WIDTH=flops+bf16", 32)])
    assert [arm_of(case) for case, _ in shape.cases if "RALEARN:" in case] == ["RALEARN+WD=0"]


def test_the_model_of_a_case_is_that_of_its_arm() -> None:
    sizes = Sizes("small", 2, 2, 32, 4096)
    assert model_and_parts(sizes, "B+WIDTH=flops:RALEARN+bf16")[0].width > 32
    _, parts = model_and_parts(sizes, "RA:1+LR=1e-3")
    assert parts.attention
    assert [type(parts.attention(layer)).__name__ for layer in (0, 1)] == [
        "CausalSelfAttention",
        "ReciprocalAttention",
    ]


def test_a_faulty_modifier_of_a_case_is_an_error() -> None:
    with pytest.raises(UserError, match=r"B\+LR=9: LR=9 is not a number in \(0, 1\]"):
        select_cases(SHAPES["card"], ["B+LR=9"])


@pytest.mark.parametrize("name", ["XB", "B@7", "XB+bf16", "B+bf16@7", "ralearn", "RALEARN:hard:9", "GATED@7"])
def test_an_unknown_case_is_an_error_of_one_line_with_the_existing_ones(name: str) -> None:
    start = rf"unknown case '{re.escape(name)}'; cases: plain \(plain@12, plain@32\), B"
    with pytest.raises(UserError, match=start) as refused:
        select_cases(SHAPES["card"], ["B", name])
    assert "\n" not in str(refused.value)
    assert "RALEARN:hard:8" in str(refused.value)


def test_a_shape_is_found_by_a_part_of_its_name_and_an_unknown_one_is_an_error_that_lists_the_known() -> None:
    assert [shape.name for shape in find_shapes(SHAPES["cpu"], "t256")] == ["124m-t256", "6x384-t256"]
    assert [shape.name for shape in find_shapes(SHAPES["cpu"], "384")] == ["6x384-t256"]
    with pytest.raises(UserError, match="unknown shape '350m'; shapes: 124m-t256, 6x384-t256"):
        find_shapes(SHAPES["cpu"], "350m")
