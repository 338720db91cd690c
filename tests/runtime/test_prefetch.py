import threading

import numpy as np
import pytest
import torch

from runtime.prefetch import BatchPrefetcher


def test_batches_come_in_order_from_the_first_iteration() -> None:
    with BatchPrefetcher(lambda k: np.full((2, 3), k, dtype=np.uint16), 4, 9, "cpu") as batches:
        got = [batches.get() for _ in range(5)]
    assert [int(batch[0, 0]) for batch in got] == [4, 5, 6, 7, 8]
    assert got[0].dtype == torch.int64
    assert got[0].shape == (2, 3)


def test_an_error_in_reading_a_batch_is_raised_in_the_training_thread() -> None:
    def make(k: int) -> np.ndarray:
        if k == 2:
            raise OSError("shard gone")
        return np.zeros((1, 2), dtype=np.uint16)

    with BatchPrefetcher(make, 0, 10, "cpu") as batches:
        batches.get()
        batches.get()
        with pytest.raises(OSError, match="shard gone"):
            batches.get()


def test_a_closed_prefetcher_leaves_no_thread() -> None:
    before = threading.active_count()
    batches = BatchPrefetcher(lambda k: np.zeros((1, 2), dtype=np.uint16), 0, 10**6, "cpu")
    batches.get()
    batches.close()
    assert threading.active_count() == before
