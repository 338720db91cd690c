"""The line of a run, and the estimate of the study's remaining time."""

import pytest

from study import terminal
from study.terminal import Estimate


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    built = Clock()
    monkeypatch.setattr(terminal.time, "monotonic", lambda: built.now)
    return built


def test_runs_at_once_share_the_remaining_work(clock: Clock) -> None:
    """Two slots, five runs of 100 s: the third to fifth run take their turns."""
    estimate = Estimate(5, 100.0, slots=2)
    estimate.begin("a")
    estimate.begin("b")
    estimate.seconds_left(1e-9, "b")
    assert estimate.seconds_left(1e-9, "a") == pytest.approx(500 / 2)
    clock.now = 50.0
    estimate.seconds_left(0.5, "a")
    assert estimate.seconds_left(0.5, "b") == pytest.approx((50 + 50 + 300) / 2)
    for name in ("a", "b"):
        clock.now = 100.0
        estimate.end(name)
    estimate.begin("c")
    assert estimate.seconds_left(0.0, "c") == pytest.approx(150)
    estimate.left = 1  # the last run alone: the other slot is idle
    assert estimate.seconds_left(0.0, "c") == pytest.approx(100)
