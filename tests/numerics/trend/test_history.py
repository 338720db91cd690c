"""The limit of a history: its law, its rate of false alarms, and what it detects."""

from __future__ import annotations

import numpy as np
import pytest

from numerics.trend.history import ALARM, BEFORE, LEAST, against, history, limit, with_history


def test_the_limit_has_the_stated_probability() -> None:
    generator = np.random.default_rng(0)
    for count in (15, 63, 255):
        tests = 2  # probability ALARM / 4
        found = limit(count, tests)
        draws = generator.exponential(size=(60_000, count + 1)).astype(np.float32)
        share = float((draws[:, -1] > found * np.median(draws[:, :-1], axis=1)).mean())
        assert share == pytest.approx(ALARM / 2 / tests, rel=0.4)


def test_a_short_history_has_a_larger_limit_and_more_values_have_a_larger_limit() -> None:
    assert limit(15, 1000) > limit(63, 1000) > limit(255, 1000) > limit(255, 10) > 1
    assert limit(255, 10**6) < 40


NOISES = ("normal", "laplace", "walk", "steps of a schedule")


@pytest.mark.parametrize("kind", NOISES)
def test_clean_series_have_alarms_as_rarely_as_stated(kind: str) -> None:
    """150 tensors x 300 steps, 12 times: a run has an alarm with probability ALARM."""
    alarms = 0
    for seed in range(12):
        generator = np.random.default_rng(seed)
        noise = (
            generator.laplace(size=(150, 300)) if kind == "laplace" else generator.standard_normal((150, 300))
        )
        series = 0.2 * noise
        if kind == "walk":
            series = 0.02 * np.cumsum(noise, axis=1)
        if kind == "steps of a schedule":
            series = 0.1 * noise - 3 * np.arange(300) / 300
        values = np.exp(series).astype(np.float32)
        finite = np.isfinite(values)
        alarms += bool(history(values, finite, True, int(with_history(finite).sum())).anomalous.any())
    assert alarms <= 1


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_single_value_is_found_at_its_step(factor: float) -> None:
    generator = np.random.default_rng(1)
    values = np.exp(0.1 * generator.standard_normal((20, 400))).astype(np.float32)
    values[7, 333] *= factor
    found = history(values, np.isfinite(values), True, values.size)
    assert np.argwhere(found.anomalous).tolist() == [[7, 333]]
    assert np.sign(found.units[7, 333]) == np.sign(factor - 1)
    assert found.expected[7, 333] == pytest.approx(1, rel=0.1)


def test_a_new_level_becomes_the_expected_one() -> None:
    generator = np.random.default_rng(2)
    values = np.exp(0.05 * generator.standard_normal((1, 200))).astype(np.float32)
    values[0, 100:] *= 10
    found = history(values, np.isfinite(values), True, values.size).anomalous[0]
    assert found[100]
    assert not found[:100].any()
    assert not found[100 + BEFORE :].any()


def test_values_that_are_missing_leave_no_trace() -> None:
    generator = np.random.default_rng(3)
    full = np.exp(0.1 * generator.standard_normal((3, 300))).astype(np.float32)
    sparse = np.full((3, 3000), np.nan, dtype=np.float32)
    sparse[:, ::10] = full
    sparse[2, 1::10] = full[2]  # another row at other steps
    one = history(full, np.isfinite(full), True, 900)
    other = history(sparse, np.isfinite(sparse), True, 900)
    assert np.array_equal(one.units[:2], other.units[:2, ::10], equal_nan=True)
    assert with_history(np.isfinite(full)).sum() == 3 * (300 - BEFORE - LEAST)
    for series, found in ((full, one), (sparse, other)):
        assert np.array_equal(with_history(np.isfinite(series)), np.isfinite(found.units))


def test_constant_and_zero_values_are_no_anomaly_and_their_end_is_one() -> None:
    values = np.zeros((2, 100), dtype=np.float32)
    values[1] = 3.0
    finite = np.isfinite(values)
    assert not history(values, finite, True, values.size).anomalous.any()
    values[0, 60:] = 1e-3
    assert np.argwhere(history(values, finite, True, values.size).anomalous)[0].tolist() == [0, 60]


def test_a_step_that_is_unusual_in_both_runs_is_no_difference() -> None:
    generator = np.random.default_rng(4)
    first = np.exp(0.1 * generator.standard_normal((10, 200))).astype(np.float32)
    first[:, 150] *= 20
    second = first * np.exp(0.01 * generator.standard_normal(first.shape)).astype(np.float32)
    finite = np.isfinite(first)
    envelope = history(first, finite, True, first.size)
    assert envelope.anomalous[:, 150].all()
    assert not against(second, first, finite, envelope, True).anomalous.any()
    second[3, 120] *= 8
    assert np.argwhere(against(second, first, finite, envelope, True).anomalous).tolist() == [[3, 120]]


def test_signed_values_are_tested_on_their_own_scale() -> None:
    generator = np.random.default_rng(5)
    values = generator.standard_normal((5, 200)).astype(np.float32)
    values[2, 180] = -60
    found = history(values, np.isfinite(values), False, values.size)
    assert np.argwhere(found.anomalous).tolist() == [[2, 180]]
