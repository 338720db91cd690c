"""Test the size of the noise over training, and the names of schedules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ra.noise_schedule import PRESETS, NoiseError, NoiseSchedule, parse_noise

SIGMAS = st.floats(1e-6, 10.0)


@given(SIGMAS, SIGMAS, st.integers(3, 30), st.integers(1, 1000))
def test_the_intervals_are_one_without_noise_and_a_geometric_sequence(
    first: float, second: float, intervals: int, iterations: int
) -> None:
    start, end = max(first, second), min(first, second)
    schedule = NoiseSchedule(start, end, intervals)
    expected = [0.0, *np.geomspace(start, end, intervals - 1)]
    found = [schedule.sigma(iteration, iterations) for iteration in range(iterations)]
    for iteration, sigma in enumerate(found):
        assert sigma == pytest.approx(expected[intervals * iteration // iterations], rel=1e-9)
    assert found[0] == 0.0
    noisy = [sigma for sigma in found if sigma]
    assert noisy == sorted(noisy, reverse=True)
    if iterations >= intervals:
        assert (noisy[0], noisy[-1]) == (pytest.approx(start), pytest.approx(end))


def test_the_presets_are_those_of_the_2025_study() -> None:
    found = {name: (schedule.start, schedule.end, schedule.intervals) for name, schedule in PRESETS.items()}
    assert found == {"mild": (0.025, 0.00025, 10), "qerl": (0.05, 0.0005, 10), "strong": (0.1, 0.001, 10)}


def test_own_values_and_the_last_norm() -> None:
    assert parse_noise("0.05:0.0005") == parse_noise("5e-2:5e-4:10") == parse_noise("qerl")
    assert parse_noise("mild:final") == NoiseSchedule(0.025, 0.00025, 10, final=True)
    assert parse_noise("0.1:0.1:3:final") == NoiseSchedule(0.1, 0.1, 3, final=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"there is no preset \(empty\); fix: use AQN=mild"),
        ("0.0005:0.05", r"sigma_end 0\.05 is above sigma_start 0\.0005; fix: exchange them"),
        ("0.1:0.01:2", "2 intervals are too few; fix: use 3 or more"),
        ("0.1:0.01:\u0663", "is malformed"),
        (f"0.1:0.01:{'9' * 5000}", "is malformed"),
        ("0:0", r"sigmas are numbers in \(0, 10\]"),
    ],
)
def test_a_malformed_schedule_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(NoiseError, match=says) as caught:
        parse_noise(text)
    assert "\n" not in str(caught.value)
    assert "fix:" in str(caught.value)
