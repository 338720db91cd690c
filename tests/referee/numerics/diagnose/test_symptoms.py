"""Symptoms of synthetic curves, over lengths, noise, logging intervals, step numbers and missing steps."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpt2.watch import SpikeDetector
from referee.numerics.diagnose.spikes import find_spikes
from referee.numerics.diagnose.symptoms import (
    EQUAL,
    LOSS,
    NORM,
    ROUNDING,
    diagnose,
    more_frequent,
    pair_curves,
)
from referee.verdict.loss_files import LossCurve
from tests.referee.numerics.diagnose.curves import benchmark, curve, rounded

LENGTHS = st.integers(1, 600)
NOISES = st.sampled_from([0.0, 1e-3, 0.02, 0.1])
EVERY = st.sampled_from([1, 1, 2, 7, 10])
SEEDS = st.integers(0, 1000)
FEWER = settings(max_examples=40)


def symptom(one: LossCurve, other: LossCurve, **options: bool) -> str:
    """The symptom; the order of the runs must not change it."""
    found = diagnose(pair_curves(one, other), **options).symptom
    assert diagnose(pair_curves(other, one), **options).symptom == found
    return found


def logged(values: LossCurve, every: int) -> LossCurve:
    """The values that a trainer with another logging interval has."""
    kept = {step: value for step, value in values.losses.items() if step % every == 0 or step == 1}
    return dataclasses.replace(values, losses=kept)


@FEWER
@given(LENGTHS, NOISES, SEEDS, EVERY)
def test_rounding_is_no_symptom(length: int, noise: float, seed: int, every: int) -> None:
    one = benchmark(length, noise, seed)
    other = logged(curve(rounded(one, seed + 1)), every)
    assert symptom(curve(one), other) in (ROUNDING, EQUAL)
    assert symptom(curve(one), curve(one)) == EQUAL


@given(LENGTHS, NOISES, SEEDS, EVERY, st.sampled_from([0.03, -0.03, 0.5]))
def test_a_difference_from_the_first_step_on(
    length: int, noise: float, seed: int, every: int, size: float
) -> None:
    one = benchmark(length, noise, seed)
    other = logged(curve(rounded(one) * (1 + size)), every)
    assert symptom(curve(one), other) == "first-step difference"
    found = diagnose(pair_curves(curve(one), other))
    assert found.finding.step == 1
    assert found.pair.beyond
    assert found.pair.beyond.step == 1


@FEWER
@given(st.integers(60, 600), NOISES, SEEDS, st.sampled_from([1, 1, 2, 3]), st.sampled_from([0.04, -0.04]))
def test_a_later_drift(length: int, noise: float, seed: int, every: int, size: float) -> None:
    one, start = benchmark(length, noise, seed), length // 3
    other = rounded(one)
    other[start:] *= 1 + np.linspace(0, size, length - start)
    assume(not find_spikes(one))
    assert symptom(curve(one), logged(curve(other), every)) == "drift"
    found = diagnose(pair_curves(curve(one), curve(other)))
    assert start < found.finding.step <= start + (length - start) / 2


@FEWER
@given(st.integers(150, 600), st.sampled_from([1e-3, 0.02]), SEEDS, st.integers(3, 6))
def test_more_spikes(length: int, noise: float, seed: int, count: int) -> None:
    one = benchmark(length, noise, seed)
    other = rounded(one)
    places = np.linspace(60, length - 20, count).astype(int)
    other[places] *= 2.0
    assume(not find_spikes(one))
    assert symptom(curve(one), curve(other)) == "spikes"
    found = diagnose(pair_curves(curve(one), curve(other)))
    assert (found.finding.step, found.finding.what) == (places[0] + 1, LOSS)
    assert (found.finding.first, found.finding.second) == ("0 spikes", f"{count} spikes")
    both = one.copy()
    both[places] *= 2.0
    assert symptom(curve(both), curve(other)) == ROUNDING


@FEWER
@given(SEEDS, st.lists(st.integers(17, 380), min_size=1, max_size=5, unique=True), st.floats(1.5, 5))
def test_spikes_are_those_of_the_trainer(seed: int, places: list[int], size: float) -> None:
    losses = 4 + 0.05 * np.random.default_rng(seed).standard_normal(400)
    losses[places] *= size
    detector = SpikeDetector()
    reference = {place for place, loss in enumerate(losses) if detector.observe(float(loss)) is not None}
    found = {place for first, last in find_spikes(losses) for place in range(first, last + 1)}
    # of spikes close together the medians differ; the first one is always the same
    assert min(found, default=None) == min(reference, default=None)


@FEWER
@given(LENGTHS, SEEDS, st.floats(0, 1), st.sampled_from([math.nan, math.inf]), st.booleans())
def test_a_value_that_is_not_finite_in_one_run_only(
    length: int, seed: int, where: float, value: float, until_end: bool
) -> None:
    one = benchmark(length, seed=seed)
    other, place = rounded(one), min(length - 1, int(where * length))
    other[place : None if until_end else place + 1] = value
    assert symptom(curve(one), curve(other)) == "overflow or NaN"
    found = diagnose(pair_curves(curve(one), curve(other)))
    assert (found.finding.step, found.finding.first) == (place + 1, "not finite in 0 steps")


def test_values_that_are_not_finite_in_both_are_compared() -> None:
    one = benchmark(300)
    for places, others, expected in (
        ([50], [50], ROUNDING),
        ([50], [90], "beyond rounding"),
        ([50], [50, 90], "beyond rounding"),
        ([50], [50, 90, 100, 110], "overflow or NaN"),
        ([50, 299], [50], "overflow or NaN"),
    ):
        a, b = one.copy(), rounded(one)
        a[places], b[others] = math.nan, math.nan
        assert symptom(curve(a), curve(b)) == expected, (places, others)
    never = curve([math.nan] * 5)
    found = diagnose(pair_curves(never, curve([math.nan] * 5, name="other")))
    assert found.symptom == EQUAL
    assert any("not finite" in note for note in found.notes)


@FEWER
@given(LENGTHS, SEEDS)
def test_equal_settings_are_reproducible_only_to_the_bit(length: int, seed: int) -> None:
    one = benchmark(length, seed=seed)
    other = one.copy()
    assert symptom(curve(one), curve(other), same_settings=True) == EQUAL
    other[-1] = np.nextafter(other[-1], 9)
    assert symptom(curve(one), curve(other), same_settings=True) == "not reproducible"
    assert symptom(curve(one), curve(other)) == ROUNDING


@given(st.integers(3, 300), st.sampled_from([1e-3, 0.1]), SEEDS, st.booleans())
def test_steps_that_count_from_0_and_from_1_are_aligned(
    length: int, noise: float, seed: int, swapped: bool
) -> None:
    one = benchmark(length, noise, seed)
    sides = [curve(one), curve(one, first=0)][:: -1 if swapped else 1]
    pair = pair_curves(*sides)
    assert len(pair.steps) == length
    assert pair.unequal is None


@FEWER
@given(st.integers(0, 40), st.integers(0, 40))
def test_more_frequent_is_the_binomial_test(count: int, other: int) -> None:
    from scipy.stats import binomtest

    expected = binomtest(count, count + other, alternative="greater").pvalue if count + other else 1.0
    assert more_frequent(count, other) == (expected <= 1 / 8)
    assert more_frequent(1000 + 60, 1000) == (binomtest(1060, 2060, alternative="greater").pvalue <= 1 / 8)


def scored(values: LossCurve, **scores: tuple[float, float | None]) -> LossCurve:
    """The curve with evaluations at its last step: name -> value and standard error."""
    step = values.steps[-1]
    for name, (value, error) in scores.items():
        values.evaluations[name] = {step: value}
        if error is not None:
            values.evaluations[f"{name}_stderr"] = {step: error}
    return values


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((0.30, None), (0.25, None), "downstream only"),
        ((0.30, 0.02), (0.25, 0.02), ROUNDING),
        ((0.30, 0.007), (0.25, 0.007), "downstream only"),
        ((0.30, None), (0.302, None), ROUNDING),
        ((0.30, None), (math.nan, None), "downstream only"),
    ],
)
def test_downstream_only(
    first: tuple[float, float | None], second: tuple[float, float | None], expected: str
) -> None:
    one = benchmark(100)
    a, b = scored(curve(one), acc=first), scored(curve(rounded(one)), acc=second)
    assert symptom(a, b) == expected
    far = scored(curve(one * 1.1), acc=second)
    assert symptom(a, far) == "first-step difference"


def test_losses_around_zero_are_compared_with_their_size() -> None:
    draws = np.random.default_rng(0).standard_normal(200)
    one, other = 1e-2 * draws, 1e-2 * draws * (1 + 1e-7)
    one[50] = other[50] = 1e-12
    other[50] += 1e-10
    assert symptom(curve(one), curve(other)) == ROUNDING


@pytest.mark.parametrize(("level", "expected"), [(0.3, True), (0.77, False)])
def test_a_reward_or_logp_diff_that_parts_is_named(level: float, expected: bool) -> None:
    draws = np.random.default_rng(1)
    a, b = curve(benchmark(200)), curve(benchmark(200))
    a.evaluations["reward"] = curve(0.77 + 0.05 * draws.standard_normal(200)).losses
    b.evaluations["reward"] = curve(np.linspace(0.77, level, 200) + 0.05 * draws.standard_normal(200)).losses
    found = diagnose(pair_curves(a, b))
    assert (found.symptom == "downstream only") is expected
    assert found.finding.what.startswith("reward" if expected else "loss")
    far = dataclasses.replace(b, losses={step: 2 * value for step, value in b.losses.items()})
    assert any(note.startswith("reward") for note in diagnose(pair_curves(a, far)).notes) is expected


def test_evaluations_share_the_chance_of_five_percent() -> None:
    """2.2 standard errors of one evaluation are beyond chance; of the largest of twenty they are not."""
    error = 0.01 / 2**0.5
    others = {f"task{number}": (0.30, error) for number in range(19)}
    for more, expected in (({}, "downstream only"), (others, EQUAL)):
        a = scored(curve(benchmark(3)), acc=(0.300, error), **more)
        b = scored(curve(benchmark(3)), acc=(0.322, error), **more)
        assert symptom(a, b) == expected


def test_spikes_of_the_gradient_norm_count() -> None:
    one, norms = benchmark(300), benchmark(300, seed=5)
    more = norms.copy()
    more[[100, 150, 200, 250]] *= 40
    a, b = curve(one), curve(rounded(one))
    a.gradient_norms, b.gradient_norms = curve(norms).losses, curve(more).losses
    found = diagnose(pair_curves(a, b))
    assert (found.symptom, found.finding.what, found.finding.step) == ("spikes", NORM, 101)
