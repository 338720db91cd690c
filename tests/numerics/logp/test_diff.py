"""logp_diff against a loop in Python, its invariants, and unusable input."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics import NumericsError, logp_diff


def loop(rollout: Any, training: Any, mask: Any) -> tuple[float, float]:
    """The definition, written out: verl's masked_mean of both sides by sequence, then their difference's mean."""
    means, absolutes = [], []
    for a, b, m in zip(rollout, training, mask, strict=True):
        count = sum(1 for flag in m if flag)
        of_rollout = math.fsum(x for x, flag in zip(a, m, strict=True) if flag) / count
        of_training = math.fsum(x for x, flag in zip(b, m, strict=True) if flag) / count
        means.append(of_rollout - of_training)
        absolutes.append(math.fsum(abs(x - y) for x, y, flag in zip(a, b, m, strict=True) if flag) / count)
    return math.fsum(means) / len(means), math.fsum(absolutes) / len(absolutes)


LOGP = st.floats(-30, 0, width=32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
    sequences, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 6))

    def matrix(element: st.SearchStrategy[Any]) -> Any:
        row = st.lists(element, min_size=tokens, max_size=tokens)
        return draw(st.lists(row, min_size=sequences, max_size=sequences))

    mask = matrix(st.integers(0, 1))
    for row in mask:
        row[draw(st.integers(0, tokens - 1))] = 1
    return matrix(LOGP), matrix(LOGP), mask


@given(cases(), st.floats(0, 1))
def test_it_is_the_definition(case: Any, threshold: float) -> None:
    found = logp_diff(*case, threshold=threshold)
    value, absolute = loop(*case)
    assert found.value == pytest.approx(value, abs=1e-9)
    assert found.mean_absolute == pytest.approx(absolute, abs=1e-9)
    assert found.mean_absolute >= abs(found.value) - 1e-12
    expected = [
        (number, place)
        for number, (a, b, m) in enumerate(zip(*case, strict=True))
        for place, (x, y, flag) in enumerate(zip(a, b, m, strict=True))
        if flag and abs(x - y) > threshold
    ]
    assert ((found.first.sequence, found.first.position) if found.first else None) == (expected or [None])[0]
    assert logp_diff(case[1], case[0], case[2]).value == pytest.approx(-found.value, abs=1e-12)
    assert logp_diff(case[0], case[0], case[2]).value == 0


@given(cases(), st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_values_outside_the_mask_change_nothing(case: Any, other: float) -> None:
    rollout, training, mask = case
    changed = [
        [x if flag else other for x, flag in zip(row, flags, strict=True)]
        for row, flags in zip(rollout, mask, strict=True)
    ]
    a, b = logp_diff(rollout, training, mask), logp_diff(changed, training, mask)
    assert (a.value, a.first, a.sequences) == (b.value, b.first, b.sequences)
    assert np.array_equal(a.per_token, b.per_token)


def test_sequences_count_equally_whatever_their_length() -> None:
    found = logp_diff([[-1.0, -1.0], [-1.0, 0.0]], [[-2.0, -2.0], [-1.0, 0.0]], [[1, 1], [1, 0]])
    assert found.value == 0.5
    assert found.verdict == "over the threshold"


def test_differences_that_cancel_are_not_hidden() -> None:
    found = logp_diff([[-1.0, -2.0]], [[-2.0, -1.0]])
    assert found.value == 0
    assert not found.exceeds
    assert found.verdict == "differences of both signs cancel"
    assert found.first is not None
    assert found.first.position == 0


def test_the_threshold_itself_is_allowed() -> None:
    assert logp_diff([[-0.5]], [[-0.75]], threshold=0.25).verdict == "within the threshold"
    assert logp_diff([[-0.5]], [[-0.75]], threshold=0.2499).verdict == "over the threshold"


def test_prefill_and_decode_are_apart() -> None:
    found = logp_diff([[-9.0, -1.0, -1.0, -1.0]], [[-5.0, -1.0, -2.0, -3.0]], [[0, 1, 1, 1]])
    assert (found.first_token, found.decode) == (0.0, 1.5)
    assert found.first is not None
    assert (found.first.position, found.first.response) == (2, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_over_every_threshold(bad: float) -> None:
    found = logp_diff([[-1.0, bad]], [[-1.0, -1.0]], threshold=1e9)
    assert found.exceeds
    assert found.first is not None
    assert found.first.position == 1
    assert logp_diff([[bad]], [[bad]]).exceeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_and_one_sequence(dtype: torch.dtype) -> None:
    a = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True)
    found = logp_diff(a, torch.tensor([-1.5, -2.5]), torch.tensor([True, False]))
    assert found.value == 0.5
    assert found.per_token.tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([[-1.0]], [[-1.0, -1.0]]), "shape"),
        (([[-1.0]], [[-1.0]], [[1, 1]]), "shape"),
        (([[-1.0], [-1.0]], [[-1.0], [-1.0]], [[1], [0]]), "sequence 1 has none"),
        (([[-1.0]], [[-1.0]], [[0]]), "sequence 0 has none"),
        (([[-1.0]], [[-1.0]], [[math.nan]]), "NaN"),
        (([], []), "no sequences"),
        (([[]], [[]]), "no sequences"),
        (([[[-1.0]]], [[[-1.0]]]), "3 dimensions"),
        ((-1.0, -1.0), "0 dimensions"),
        (([["a"]], [[-1.0]]), "not an array"),
        (([[-1.0], [-1.0, -2.0]], [[-1.0]]), "not an array"),
        ((None, [[-1.0]]), "dimensions"),
    ],
)
def test_unusable_input_is_an_error_with_a_fix(arguments: Any, word: str) -> None:
    with pytest.raises(NumericsError, match=word) as found:
        logp_diff(*arguments)
    assert "fix:" in str(found.value)


@pytest.mark.parametrize("threshold", [-1, math.nan, math.inf, "a"])
def test_an_unusable_threshold_is_an_error(threshold: Any) -> None:
    with pytest.raises(NumericsError, match="threshold"):
        logp_diff([[-1.0]], [[-1.0]], threshold=threshold)
