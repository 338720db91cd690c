"""Run a suite as the command does, with its results in a temporary folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import tables
from bench.suite import Given, Suite, run_suite


def run_small(
    suite: Suite,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shape: str = "",
    rounds: int | None = None,
    seconds: float | None = None,
    cases: str = "",
) -> dict[str, Any]:
    """Run a suite. Returns the content of its JSON file."""
    monkeypatch.setattr(tables, "RESULTS", folder / "results" / "bench")
    run_suite(suite, Given(shape, rounds, seconds, cases))
    return saved(suite)


def saved(suite: Suite) -> dict[str, Any]:
    """Read the JSON file of a suite."""
    found: dict[str, Any] = json.loads((tables.RESULTS / f"{suite.name}.json").read_text())
    return found
