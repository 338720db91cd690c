"""Selection of cases by name."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case_step import model_and_parts
from bench.cases import SHAPES, Sizes, select_cases
from runtime.errors import UserError

CASES = [case for shape in SHAPES["card"] for case in shape.cases]


@given(st.sets(st.sampled_from(CASES), min_size=1))
def test_cases_are_selected_by_name_and_micro_batch_in_their_order(wanted: set[tuple[str, int]]) -> None:
    (shape,) = select_cases(SHAPES["card"], [f"{case}@{micro}" for case, micro in wanted])
    assert shape.cases == tuple(case for case in CASES if case in wanted)
    (whole,) = SHAPES["card"]
    assert replace(shape, cases=whole.cases) == whole


def test_the_model_of_a_case_is_that_of_its_arm() -> None:
    sizes = Sizes("small", 2, 2, 32, 4096)
    assert model_and_parts(sizes, "B+WIDTH=flops:RALEARN+bf16")[0].width > 32
    _, parts = model_and_parts(sizes, "RA:1+LR=1e-3")
    assert parts.attention
    assert [type(parts.attention(layer)).__name__ for layer in (0, 1)] == [
        "CausalSelfAttention",
        "ReciprocalAttention",
    ]


@pytest.mark.parametrize("name", ["XB", "B@7", "XB+bf16", "B+bf16@7", "ralearn", "RALEARN:hard:9", "GATED@7"])
def test_an_unknown_case_is_an_error_of_one_line_with_the_existing_ones(name: str) -> None:
    start = rf"unknown case '{re.escape(name)}'; cases: plain \(plain@12, plain@32\), B"
    with pytest.raises(UserError, match=start) as refused:
        select_cases(SHAPES["card"], ["B", name])
    assert "\n" not in str(refused.value)
    assert "RALEARN:hard:8" in str(refused.value)
