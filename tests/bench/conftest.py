"""Fixtures of the bench tests."""

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.runner import BenchWorker


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process, which has loaded torch, execute the calls of workers. They are pickled as for a process."""

    def call(
        worker: BenchWorker, function: Callable[..., Any], *arguments: Any, limit_seconds: float | None = None
    ) -> Any:
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        return pickle.loads(pickle.dumps(function(*arguments)))

    monkeypatch.setattr(BenchWorker, "__init__", lambda worker, label, heap=None: None)
    monkeypatch.setattr(BenchWorker, "__exit__", lambda worker, *error: None)
    monkeypatch.setattr(BenchWorker, "call", call)
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
