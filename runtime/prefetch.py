"""Prefetch the global batches of a run to the device in a thread, so that training does not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

AHEAD = 2  # batches in the queue


class BatchPrefetcher:
    """Return the batches of iterations `start` .. `end` - 1 in order.

    make(iteration) -> uint16 (E, T+1); get() -> int64 (E, T+1) on the device. The next `get` raises an exception of
    `make`. Close the prefetcher, or use it as a context, to end its thread.
    """

    def __init__(self, make: Callable[[int], np.ndarray], start: int, end: int, device: str) -> None:
        self._make = make
        self._device = torch.device(device)
        self._ready: queue.Queue[Tensor | BaseException] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(start, end), name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self, start: int, end: int) -> None:
        item: Tensor | BaseException
        for iteration in range(start, end):
            try:
                item = torch.from_numpy(self._make(iteration).astype(np.int64))
                if self._device.type != "cpu":
                    item = item.pin_memory()
            except BaseException as error:  # `get` raises it in the training thread
                item = error
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if self._closed.is_set() or isinstance(item, BaseException):
                return

    def get(self) -> Tensor:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item.to(self._device, non_blocking=True)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> BatchPrefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
