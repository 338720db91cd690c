"""Run a suite as the command does, with its results in a temporary folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import suite as suites
from bench.cases import Shape
from bench.suite import Suite, run_suite

SHAPE = Shape("small", 2, 2, 16, 8, (("plain", 4), ("B", 4), ("RALEARN", 4), ("B", 8)), plain_micro=4)


def run_small(suite: Suite, folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> dict[str, Any]:
    """Run a suite with these options. Returns the content of its JSON file."""
    monkeypatch.setattr(suites, "RESULTS", folder / "results" / "bench")
    run_suite(suite, {name.upper(): value for name, value in given.items()})
    found: dict[str, Any] = json.loads((suites.RESULTS / f"{suite.name}.json").read_text())
    return found
