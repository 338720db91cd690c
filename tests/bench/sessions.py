"""Run a suite as the command does, with its results in a temporary folder."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import runner
from bench import suite as suites
from bench.cases import Shape
from bench.suite import Suite, run_suite

SHAPE = Shape("small", 2, 2, 16, 8, (("plain", 4), ("B", 4), ("RALEARN", 4), ("B", 8)), plain_micro=4)


def run_small(suite: Suite, folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """Run a suite with these options. Returns the content of its JSON file."""
    monkeypatch.setattr(suites, "RESULTS", folder / "results" / "bench")
    run_suite(suite, {name.upper(): value for name, value in given.items()})
    return saved(suite)


def saved(suite: Suite) -> dict[str, Any]:
    """Read the JSON file of a suite."""
    found: dict[str, Any] = json.loads((suites.RESULTS / f"{suite.name}.json").read_text())
    return found


def measured(speed: float, step_seconds: float = 1.0, peak_bytes: int = 7) -> dict[str, Any]:
    """Return what a worker measures in a turn."""
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": speed,
        "peak_bytes": peak_bytes,
        "flops_per_token": 100.0,
        "nanogpt_flops_per_token": 110.0,
    }


def replace_workers(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., dict[str, Any]]) -> None:
    """Let `measure` stand in for workers that time a case."""

    @contextmanager
    def open_workers(persistent: bool) -> Iterator[runner.Measure]:
        yield measure

    monkeypatch.setattr(runner, "open_workers", open_workers)
    monkeypatch.setattr(runner, "exact_peak", lambda shape, case, micro: 9)
