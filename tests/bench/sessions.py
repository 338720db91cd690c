"""Run a suite as the command does, with its results in a temporary folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import suite as suites
from bench.suite import Suite, run_suite


def run_small(suite: Suite, folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """Run a suite with these options. Returns the content of its JSON file."""
    monkeypatch.setattr(suites, "RESULTS", folder / "results" / "bench")
    run_suite(suite, {name.upper(): value for name, value in given.items()})
    return saved(suite)


def saved(suite: Suite) -> dict[str, Any]:
    """Read the JSON file of a suite."""
    found: dict[str, Any] = json.loads((suites.RESULTS / f"{suite.name}.json").read_text())
    return found
