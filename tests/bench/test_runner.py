"""Rounds, ratios, and a case that is measured in a process."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench import runner, suite
from bench.cases import Shape
from bench.runner import Stage, measure_stage
from bench.suite import SuiteSession
from runtime import resolve
from runtime.settings import ANY_TARGET
from tests.bench.sessions import SHAPE, measured, replace_workers

SPREAD = ("median", "low", "high", "least", "most")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteSession:
    """A session on a simulated GPU of 1e5 FLOP/s."""
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    resolved = resolve.resolve(ANY_TARGET)
    target = dataclasses.replace(resolved.target, peak_flops=1e5)
    return SuiteSession("speed", dataclasses.replace(resolved, device="cuda:0", target=target))


def test_the_cases_take_turns_and_drift_of_the_machine_cancels_in_the_ratios(
    session: SuiteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        drift = 1.0 + 0.5 * (len(order) // len(SHAPE.cases))  # each round on a faster machine
        order.append((case, micro))
        speed = {"plain": 100, "B": 150, "RALEARN": 120}[case]
        return measured(drift * speed, peak_bytes=speed)

    replace_workers(monkeypatch, measure)
    found = measure_stage(Stage(SHAPE, 3, 1.0), session, {})
    assert order == list(SHAPE.cases) * 3
    rows = {(row["case"], row["micro"]): row for row in found}
    assert rows["B", 4]["to_plain"] == pytest.approx(dict.fromkeys(SPREAD, 1.5))
    assert rows["RALEARN", 4]["to_baseline"] == pytest.approx(dict.fromkeys(SPREAD, 0.8))
    assert rows["plain", 4]["to_baseline"] is rows["B", 4]["to_baseline"] is None
    assert rows["B", 8]["to_plain_same_micro"] is None
    assert rows["B", 4]["memory_to_plain_same_micro"] == pytest.approx(1.5)
    assert rows["RALEARN", 4]["memory_to_baseline"] == pytest.approx(0.8)
    assert rows["B", 4]["mfu"] == pytest.approx(225 * 100 / 1e5)
    assert rows["B", 4]["mfu_nanogpt"] == pytest.approx(225 * 110 / 1e5)


def test_a_peak_is_measured_in_a_process_and_grows_with_the_text() -> None:
    short, long = (runner.exact_peak(Shape(f"{T}", 2, 2, 32, T, ()), "B", 1) for T in (16, 256))
    assert 0 < short < long
