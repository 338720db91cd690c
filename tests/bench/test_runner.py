"""Rounds, ratios, the choice of cases, and a case that is measured in a process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench import runner, suite
from bench.cases import Shape
from bench.runner import measure_shape
from bench.suite import SuiteSession, spread
from runtime import resolved_target
from runtime.settings import ANY_TARGET
from tests.bench.sessions import SHAPE


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteSession:
    """A session of three rounds on a simulated GPU of 1e5 FLOP/s."""
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    resolved = resolved_target.resolve(ANY_TARGET)
    target = dataclasses.replace(resolved.target, peak_flops=1e5)
    return SuiteSession("speed", dataclasses.replace(resolved, device="cuda:0", target=target), rounds=3)


def test_the_cases_take_turns_and_drift_of_the_machine_cancels_in_the_ratios(
    session: SuiteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        drift = 1.0 + 0.5 * (len(order) // len(SHAPE.cases))  # each round on a faster machine
        order.append((case, micro))
        speed = {"plain": 100, "B": 150, "RALEARN": 120}[case]
        return {
            "step_seconds": 1.0,
            "tokens_per_second": drift * speed,
            "peak_bytes": speed,
            "flops_per_token": 100.0,
        }

    monkeypatch.setattr(runner, "measure_case", measure)
    found = measure_shape(SHAPE, session, {})
    assert order == list(SHAPE.cases) * 3
    rows = {(row["case"], row["micro"]): row for row in found}
    assert rows["B", 4]["to_plain"] == pytest.approx({"median": 1.5, "low": 1.5, "high": 1.5})
    assert rows["RALEARN", 4]["to_baseline"] == pytest.approx({"median": 0.8, "low": 0.8, "high": 0.8})
    assert rows["plain", 4]["to_baseline"] is rows["B", 4]["to_baseline"] is None
    assert rows["B", 8]["to_plain_same_micro"] is None
    assert rows["B", 4]["memory_to_plain_same_micro"] == pytest.approx(1.5)
    assert rows["RALEARN", 4]["memory_to_baseline"] == pytest.approx(0.8)
    assert rows["B", 4]["mfu"] == pytest.approx(225 * 100 / 1e5)


def test_below_six_rounds_an_interval_is_the_range_and_from_then_on_one_of_the_median() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}
    found = spread([float(value) for value in range(40)])
    assert found
    assert 0 < found["low"] < found["median"] < found["high"] < 39
    assert spread([]) is None
