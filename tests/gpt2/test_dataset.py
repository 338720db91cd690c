"""Test batches and validation windows of a token stream."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import dataset
from gpt2.dataset import TokenStream, global_batch, validation_windows
from gpt2.text_sources import DataError


def stream(tokens: int, shard: int = 50) -> TokenStream:
    values = np.arange(tokens, dtype=np.uint16)
    return TokenStream([values[start : start + shard] for start in range(0, tokens, shard)])


@settings(max_examples=60)
@given(
    windows=st.integers(1, 40),
    extra=st.integers(1, 6),
    block=st.integers(1, 7),
    effective=st.integers(1, 17),
    seed=st.integers(0, 5),
)
def test_every_window_occurs_once_an_epoch_at_every_batch_size(
    windows: int, extra: int, block: int, effective: int, seed: int
) -> None:
    train = stream(windows * block + min(extra, block), shard=13)
    epochs = 3
    rows = np.concatenate(
        [global_batch(train, block, effective, seed, k) for k in range(-(-windows * epochs // effective))]
    )[: windows * epochs]
    for row in rows:
        assert row[0] % block == 0
        assert row.tolist() == list(range(row[0], row[0] + block + 1))
    for epoch in range(epochs):
        firsts = rows[epoch * windows : (epoch + 1) * windows, 0]
        assert Counter(firsts.tolist()) == Counter(range(0, windows * block, block))


def test_the_batch_of_an_iteration_is_a_pure_function_of_data_seed_and_iteration() -> None:
    train = stream(997)
    late_first = [global_batch(train, 8, 5, 3, k) for k in (40, 2, 17)]
    dataset._order.cache_clear()
    for k, batch in zip((40, 2, 17), late_first, strict=True):
        assert np.array_equal(batch, global_batch(stream(997, shard=101), 8, 5, 3, k))
    assert not np.array_equal(late_first[0], global_batch(train, 8, 5, 4, 40))


def test_the_order_of_sequences_does_not_depend_on_the_effective_batch() -> None:
    train = stream(500)
    small = np.concatenate([global_batch(train, 8, 4, 0, k) for k in range(30)])
    large = np.concatenate([global_batch(train, 8, 12, 0, k) for k in range(10)])
    assert np.array_equal(small, large)


def test_each_epoch_has_another_order() -> None:
    train = stream(801)
    first, second = (global_batch(train, 8, 100, 0, k)[:, 0].tolist() for k in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != sorted(first)


def test_validation_windows_are_the_first_of_the_validation_text() -> None:
    windows = validation_windows(stream(100), block_size=8, tokens=40)
    assert windows.shape == (5, 9)
    assert windows[:, 0].tolist() == [0, 8, 16, 24, 32]
    assert validation_windows(stream(100), block_size=8, tokens=10**9).shape == (12, 9)


def test_too_little_text_is_refused_with_the_fix() -> None:
    with pytest.raises(DataError, match=r"9 tokens, less than one sequence of CONFIG_GPT2_BLOCK_SIZE=9"):
        global_batch(stream(9), 9, 1, 0, 0)
    with pytest.raises(DataError, match="smaller block size"):
        validation_windows(stream(9), 9, 100)
