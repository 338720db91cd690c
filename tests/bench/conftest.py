"""Fixtures of the bench tests."""

import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.case_step import prepare_case
from bench.workers import BenchWorker


@pytest.fixture(autouse=True)
def _no_prepared_case() -> Iterator[None]:
    """Forget the cases that a test prepared in this process."""
    yield
    prepare_case.cache_clear()


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process, which has loaded torch, execute the calls of workers. They are pickled as for a process.

    Calls of several threads take turns: torch's choice of attention kernels belongs to the process.
    """
    turn = threading.Lock()

    def call(
        worker: BenchWorker, function: Callable[..., Any], *arguments: Any, limit_seconds: float | None = None
    ) -> Any:
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        with turn:
            return pickle.loads(pickle.dumps(function(*arguments)))

    monkeypatch.setattr(BenchWorker, "__init__", lambda worker, label, heap=None: None)
    monkeypatch.setattr(BenchWorker, "__exit__", lambda worker, *error: None)
    monkeypatch.setattr(BenchWorker, "call", call)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
