"""Step times: robust to stalls, measured in turns, with intervals that cover the true ratio."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.batch_plan import BatchPlan
from study.step_timing import (
    BLOCKS,
    STEADY_TURNS,
    Timing,
    is_steady,
    steady_mean,
    step_time_ratios,
    time_in_turns,
)

BATCH = BatchPlan(4, 2, 2, 1, 16)
STEPS = st.lists(st.floats(0.5, 1.4), min_size=20, max_size=80)  # seconds


@given(STEPS, st.integers(0, 4))
def test_slow_steps_count_at_their_full_duration(samples: list[float], hiccups: int) -> None:
    slowed = [max(sample, 1.4) if place < hiccups else sample for place, sample in enumerate(samples)]
    assert steady_mean(slowed) == pytest.approx(statistics.fmean(slowed))


@given(STEPS, st.floats(5.0, 1000.0))
def test_a_stall_of_any_length_counts_as_a_slow_step(samples: list[float], stall: float) -> None:
    usual, stalled = steady_mean(samples), steady_mean([*samples, stall])
    assert stalled == pytest.approx(steady_mean([*samples, 5.0]))
    assert usual < stalled < usual + 3 * 1.4 / len(samples)


def test_an_estimate_is_steady_when_the_standard_error_of_its_mean_is_small() -> None:
    alternating = [1.0, 1.1] * STEADY_TURNS
    assert is_steady(alternating)
    assert not is_steady(alternating[: STEADY_TURNS - 1])
    assert not is_steady([1.0, 2.0] * STEADY_TURNS)


@given(st.integers(1, 200))
def test_rounds_of_one_process_become_at_most_ten_blocks_in_order(count: int) -> None:
    steps = tuple(float(number + 1) for number in range(count))
    timed = time_in_turns(
        {"a": "B", "b": "RALEARN"},
        BATCH,
        1.0,
        lambda names, batch, seconds: {name: Timing((steps,), None) for name in names},
        together=True,
    )
    assert timed["a"].samples == list(steps)
    lengths = [len(block) for block in timed["a"].blocks]
    assert len(lengths) == min(BLOCKS, count)
    assert max(lengths) - min(lengths) <= 1


def draw(generator: np.random.Generator, ratio: float, drift: float) -> dict[str, Timing]:
    """Interleaved steps on a machine whose speed drifts equally for both classes."""
    speed = np.exp(drift * np.sin(np.arange(60) / 9))
    blocks = {
        name: values * speed * generator.lognormal(0, 0.05, 60) for name, values in (("a", 1.0), ("b", ratio))
    }
    return {
        name: Timing(tuple(tuple(part) for part in np.split(values, BLOCKS)), None)
        for name, values in blocks.items()
    }


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_the_interval_covers_the_true_ratio_in_95_percent_of_timings(drift: float) -> None:
    generator, covered, ratio = np.random.default_rng(0), 0, 1.07
    for _ in range(400):
        found = step_time_ratios(draw(generator, ratio, drift), "a")["b"]
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.ratio < found.high
        covered += found.low <= ratio <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_exchanging_the_baseline_inverts_the_ratio_and_one_block_has_no_interval() -> None:
    timings = draw(np.random.default_rng(1), 1.2, 0.1)
    one, other = step_time_ratios(timings, "a")["b"], step_time_ratios(timings, "b")["a"]
    assert one.ratio * other.ratio == pytest.approx(1.0)
    assert (one.to, other.to) == ("a", "b")
    single = {name: Timing((tuple(timing.samples),), None) for name, timing in timings.items()}
    assert step_time_ratios(single, "a")["b"].low is None
    assert step_time_ratios({"a": timings["a"]}, "a") == {}
