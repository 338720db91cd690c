"""Triggers fire at the injected step, and nowhere on a clean series."""

import math
import random

import pytest

from gpt2.watch import Triggers

NAMES = ("nan", "spike", "grad_norm")


def series(seed: int, steps: int = 400) -> list[tuple[float, float]]:
    """Loss and gradient norm of a training with warm-up: a falling curve with noise."""
    draw = random.Random(seed)
    return [
        (
            2 + 8 * math.exp(-step / 60) + draw.gauss(0, 0.05),
            math.exp(draw.gauss(0, 0.1)) * (0.5 + 3 * math.exp(-step / 30)),
        )
        for step in range(steps)
    ]


def fired(found: Triggers, values: list[tuple[float, float]]) -> list[tuple[int, str]]:
    return [
        (one.step, one.trigger) for step, pair in enumerate(values, 1) for one in found.observe(step, *pair)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_nothing_fires_on_a_clean_series(seed: int) -> None:
    assert fired(Triggers(NAMES), series(seed)) == []


@pytest.mark.parametrize(
    ("at", "pair", "expected"),
    [
        (200, (math.nan, 0.5), ["nan"]),
        (200, (2.0, math.inf), ["nan"]),
        (200, (4.0, 0.5), ["spike"]),
        (200, (2.3, 9.0), ["grad_norm"]),
        (1, (math.nan, math.nan), ["nan"]),
    ],
)
def test_a_fault_is_caught_in_its_step(at: int, pair: tuple[float, float], expected: list[str]) -> None:
    values = series(3)
    values[at - 1] = pair
    assert fired(Triggers(NAMES), values) == [(at, name) for name in expected]


def test_a_resumed_process_fires_as_the_first_one_would() -> None:
    values = series(3)
    values[299] = (5.0, 50.0)
    resumed = Triggers(NAMES)
    for step, (loss, norm) in enumerate(values[200:290], 201):
        resumed.observe(step, loss, norm)
    later = [one.trigger for step in range(291, 301) for one in resumed.observe(step, *values[step - 1])]
    assert later == ["spike", "grad_norm"]
