"""Injected corruptions of tensors of random shapes and types are named by place and change."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.errors import NumericsError
from numerics.record.tensor_digest import bits_of, digest
from numerics.repeat import corruption
from numerics.repeat.corruption import ROUNDING, analyse

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
FLOATS = DTYPES[:4]
shapes = st.lists(st.integers(2, 9), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**30), 2**30, shape, generator=generator).to(dtype)


def changed(tensor: Tensor, where: Tensor) -> Tensor:
    """Flip bits 1 and the highest of the mantissa at the places, another bit each."""
    bad = tensor.clone()
    bits = bits_of(bad)
    top = corruption.MANTISSA.get(tensor.dtype, 20)
    for number, index in enumerate(where.reshape(-1).tolist()):
        bits[index] ^= (1 << (top - 1)) | (1 << (number % (top - 1)))
    return bad


@given(shapes, st.sampled_from(DTYPES), seeds, st.data())
def test_a_flipped_bit_is_named_with_its_position(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    good = values(shape, dtype, seed)
    index = data.draw(st.integers(0, good.numel() - 1))
    bit = data.draw(st.integers(0, good.element_size() * 8 - 2))
    bad = good.clone()
    bits_of(bad)[index] ^= 1 << bit
    found = analyse(good, bad)
    assert (found.place, found.count, found.bits) == (corruption.SINGLE, 1, (bit,))
    assert found.change in (corruption.BIT, corruption.ROUNDING)
    assert f"bit {bit} " in found.change_text
    if not dtype.is_floating_point or bit >= corruption.MANTISSA[dtype]:
        assert found.change == corruption.BIT or found.largest is not None
    place = [int(axis) for axis in np.unravel_index(index, shape)]
    assert str(place) in found.place_text


@given(shapes, st.sampled_from(DTYPES), seeds, st.data())
def test_a_product_of_index_ranges_is_named_as_rows_columns_or_tile(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    good = values(shape, dtype, seed)
    ranges = [
        sorted(data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))) for size in shape
    ]
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[tuple(slice(low, high + 1) for low, high in ranges)] = True
    count = int(mask.sum())
    assume(1 < count < corruption.DENSE * mask.numel())
    found = analyse(good, changed(good, mask.reshape(-1).nonzero()))
    assert found.count == count
    full = [high - low + 1 == size for (low, high), size in zip(ranges, shape, strict=True)]
    where = mask.reshape(-1).nonzero().reshape(-1)
    dense = count >= corruption.DENSE * int(where[-1] - where[0] + 1)
    if len(shape) > 1 and full[-1]:
        assert found.place == corruption.ROWS
    elif len(shape) > 1 and all(full[:-1]):
        assert found.place == corruption.COLUMNS
    elif dense:
        assert found.place == corruption.RUN
    elif sum(high > low for low, high in ranges) > 1:
        assert found.place == corruption.TILE
    else:  # a line of single elements along one dimension
        assert found.place in (corruption.SCATTERED, corruption.RUNS)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(0, 3), st.sampled_from((torch.float32, torch.bfloat16)), seeds)
def test_a_run_of_blocks_of_2048_is_named(blocks: int, start: int, dtype: torch.dtype, seed: int) -> None:
    good = values((20000,), dtype, seed)
    first = 2048 * start + 7 * (seed % 2)
    found = analyse(good, changed(good, torch.arange(first, first + 2048 * blocks)))
    assert found.place == corruption.RUN
    assert f"its length is {blocks} x 2048 elements" in found.place_text
    assert f"from element {first}" in found.place_text
    assert ("begins at a multiple of 2048 elements" in found.place_text) == (first % 2048 == 0)


def test_a_run_of_2048_bytes_in_a_matrix_of_rows_is_named_as_rows_with_its_length() -> None:
    good = values((64, 64), torch.float32, 0)
    bad = good.clone()
    bad[8:16] = 7.5
    found = analyse(good, bad)
    assert (found.place, found.change) == (corruption.ROWS, corruption.CONSTANT)
    assert "8 to 15 of dimension 0" in found.place_text
    assert "its length is 1 x 2048 bytes" in found.place_text
    assert "every differing value is 7.5" in found.change_text


@given(st.integers(2, 6), st.integers(2, 40), st.integers(50, 90), seeds)
def test_equal_runs_at_one_distance_are_named(count: int, length: int, distance: int, seed: int) -> None:
    good = values((distance * count + 1,), torch.float32, seed)
    where = torch.cat([torch.arange(length) + distance * number for number in range(count)])
    found = analyse(good, changed(good, where))
    assert found.place == corruption.RUNS
    assert f"{count} runs of {length} elements" in found.place_text
    assert f"{distance} elements apart" in found.place_text


@given(shapes, st.sampled_from(FLOATS), seeds, st.data())
def test_the_change_of_a_region_is_named(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    good = values(shape, dtype, seed)
    size = good.numel()
    assume(size >= 8)
    first = data.draw(st.integers(0, size - 5))
    last = data.draw(st.integers(first + 3, size - 1))
    kind = data.draw(st.sampled_from([corruption.NAN, corruption.ZERO, corruption.CONSTANT, corruption.MASK]))
    bad = good.clone()
    region = bad.view(-1)[first:last]
    if kind == corruption.MASK:
        bits_of(bad)[first:last] ^= 0b11 << (corruption.MANTISSA[dtype] - 2)
    else:
        region.fill_({corruption.NAN: math.nan, corruption.ZERO: 0.0, corruption.CONSTANT: 3.25}[kind])
    found = analyse(good, bad)
    assert found.change == kind, found


@given(st.integers(20, 400), st.integers(1, 15), seeds)
def test_a_shifted_copy_is_named_with_its_distance(size: int, shift: int, seed: int) -> None:
    good = values((size,), torch.float32, seed)
    bad = good.clone()
    bad[: size - shift] = good[shift:]
    found = analyse(good, bad)
    assert found.change == corruption.SHIFT
    assert f"those {shift} elements later" in found.change_text


@given(shapes, st.floats(0.5, 100).map(lambda x: x + 0.123), seeds)
def test_an_added_constant_is_named(shape: tuple[int, ...], constant: float, seed: int) -> None:
    good = values(shape, torch.float64, seed)
    bad = good + constant
    found = analyse(good, bad)
    assert found.change == corruption.ADDED
    assert f"has {constant:.6g} added" in found.change_text


@given(st.integers(100, 5000), seeds)
def test_another_order_of_a_sum_is_rounding_and_a_wrong_term_is_not(terms: int, seed: int) -> None:
    x = values((terms, 16), torch.float32, seed)
    one, other = x.sum(0), x.flip(0).cumsum(0)[-1]
    assume(not torch.equal(one, other))
    assert analyse(one, other, x.numel()).change == corruption.ROUNDING
    assert analyse(one, one + x.abs().max(), x.numel()).change != corruption.ROUNDING


@given(shapes, st.sampled_from(DTYPES), seeds)
def test_equal_tensors_have_no_corruption(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    good = values(shape, dtype, seed)
    found = analyse(good, good.clone())
    assert (found.count, found.place, str(found)) == (0, corruption.NOWHERE, "no element differs")


def test_two_shapes_cannot_be_compared() -> None:
    with pytest.raises(NumericsError, match="cannot be compared; fix"):
        analyse(torch.zeros(2), torch.zeros(3))


@given(shapes, st.sampled_from((*DTYPES, torch.bool, torch.uint8, torch.complex64)), seeds, st.data())
def test_a_digest_changes_with_every_element_and_not_with_the_layout(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    base = (
        values(shape, torch.int32, seed) % 2 == 0
        if dtype == torch.bool
        else values(shape, torch.float64, seed)
    )
    good = base.to(dtype)
    assert int(digest(good)) == int(digest(good.clone()))
    if good.dim() > 1:
        assert int(digest(good)) == int(
            digest(good.t().contiguous().t() if good.dim() == 2 else good.mT.clone().mT)
        )
    index = data.draw(st.integers(0, good.numel() - 1))
    bad = good.clone()
    bits = bits_of(bad)
    bits[index] ^= 1
    assert int(digest(good)) != int(digest(bad))


def test_a_digest_of_many_parts_depends_on_the_order_of_the_parts() -> None:
    parts = torch.arange(3 << 18, dtype=torch.int32)
    moved = torch.cat([parts[1 << 18 :], parts[: 1 << 18]])
    assert int(digest(parts)) != int(digest(moved))
    assert int(digest(parts[:0])) == 0


def test_rounding_is_that_of_the_coarsest_input() -> None:
    good = torch.linspace(0.5, 1.0, 8)
    bad = good * 1.003
    assert analyse(good, bad).change != ROUNDING
    assert analyse(good, bad, inputs=[good.bfloat16(), torch.arange(3)]).change == ROUNDING
