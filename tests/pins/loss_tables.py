"""Simulated loss tables: the inputs of pinned verdicts. The pins are of these numbers, so this file never changes.

Losses are multiples of 2**-20 nats, so that libraries that differ in the last bit give the same tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")
TABLES = 2000
SIZES = 3  # consecutive tables are one study at three model sizes
PARAMETERS = (1_100_000, 5_300_000, 29_000_000)
CONTROLS = (("B",), ("B", "RAALL"), ("B", "RAEARLY", "RALATE", "RAALL"))
JUDGED = ("RALEARN", "GATED", "DIFFERENTIAL", "QKNORM")
LOOKS = ((), (1,), (2,), (3,), (5,), (9,), (2, 4), (3, 5), (3, 6), (3, 5, 8))
MARGINS = (0.00995, 0.002, 0.03)
KINDS = ("normal", "normal", "normal", "skewed", "heavy", "missing", "missing", "diverged", "tied")
PLATFORMS = {"int8": 0.0005, "int4": 0.02, "int2": -0.05}  # and the mean gap of an arm without noise
Table = dict[str, dict[int, float]]  # arm -> seed -> loss in nats


@dataclass(frozen=True)
class LossTable:
    """A study. finished: arm -> planned seeds with every run. diverged: arm -> seeds without a finite loss."""

    number: int
    controls: tuple[str, ...]
    losses: Table
    looks: dict[str, tuple[int, ...]]
    finished: dict[str, int]
    primary: str
    margin: float
    diverged: dict[str, list[int]]
    at_common_rate: Table  # the judged arms at the learning rate of the control arms
    at_their_rate: dict[str, Table]  # judged arm -> the control arms at its learning rate
    noisy: Table  # every arm, trained with noise
    platforms: dict[str, tuple[Table, Table]]  # platform -> losses there of `losses` and of `noisy`


def exact(value: float) -> float:
    return round(value * 2**20) / 2**20


def loss_tables() -> Iterator[LossTable]:
    for number in range(TABLES):
        yield _table(number)


def _table(number: int) -> LossTable:
    study = np.random.default_rng((20261124, number // SIZES))  # what the sizes of a study share
    draw = np.random.default_rng((number, 20261124))
    kind = KINDS[int(study.integers(len(KINDS)))]
    controls = CONTROLS[0 if kind == "tied" else int(study.integers(len(CONTROLS)))]
    judged = JUDGED[: int(study.integers(1, len(JUDGED) + 1))]
    counts = LOOKS[int(study.integers(len(LOOKS)))]
    seeds = counts[-1] if counts else int(study.integers(1, 7))
    effects = {arm: _choice(study, (0.0, 0.0, 0.003, 0.02, 0.1)) * study.choice((-1, 1)) for arm in judged}
    noise = _choice(study, (0.0005, 0.003, 0.015))
    shrinking = _choice(study, (1.0, 0.3, 3.0)) ** (number % SIZES)

    def jitter() -> float:
        if kind == "tied":
            return 0.0
        if kind == "skewed":
            return noise * (float(draw.lognormal(0.0, 0.8)) - 1.377)
        return noise * float(draw.standard_t(3) if kind == "heavy" else draw.normal())

    def near(table: Table, shift: dict[str, float]) -> Table:
        return {
            arm: {seed: exact(loss + shift.get(arm, 0.0) + jitter()) for seed, loss in by_seed.items()}
            for arm, by_seed in table.items()
        }

    base = [exact(4.0 + 0.02 * float(draw.normal())) for _ in range(seeds + 1)]  # the last is not planned
    planned = {arm: dict(enumerate(base)) for arm in (*controls, *judged)}
    losses = near(planned, {arm: shrinking * effect for arm, effect in effects.items()})
    if kind == "normal" and "RALATE" in losses and study.random() < 0.3:
        losses["RALATE"] = dict(losses["B"])  # one arm under two names
    diverged: dict[str, list[int]] = {}
    if kind in ("missing", "diverged"):
        for arm in losses:
            lost = [seed for seed in losses[arm] if draw.random() < 0.08]
            if kind == "diverged" and lost:
                diverged[arm] = lost
            for seed in lost:
                del losses[arm][seed]
        if kind == "diverged" and losses[judged[0]]:
            losses[judged[0]][min(losses[judged[0]])] = exact(10.0 + jitter())  # high, and finite
    looks = dict.fromkeys(judged, counts) if counts else {}
    if len(judged) > 2 and counts[1:]:
        looks[judged[2]] = counts[1:]  # an arm of a later look
    whole = set.intersection(*(set(losses[arm]) for arm in controls))
    finished = {
        arm: sum(seed in losses[arm] and seed in whole for seed in range(ends[-1]))
        for arm, ends in looks.items()
    }
    shifts = {arm: _choice(draw, (0.0, 0.02)) for arm in losses}
    noisy = near({arm: losses[arm] for arm in (*controls, judged[0])}, shifts)
    return LossTable(
        number=number,
        controls=controls,
        losses=losses,
        looks=looks,
        finished=finished,
        primary=_choice(study, ("", judged[0])),
        margin=_choice(study, MARGINS),
        diverged=diverged,
        at_common_rate=near({arm: losses[arm] for arm in judged}, shifts),
        at_their_rate={arm: near({one: losses[one] for one in controls}, shifts) for arm in judged},
        noisy=noisy,
        platforms={
            name: (near(losses, dict.fromkeys(losses, gap)), near(noisy, dict.fromkeys(noisy, gap / 2)))
            for name, gap in PLATFORMS.items()
        },
    )


def _choice(draw: np.random.Generator, values: tuple[T, ...]) -> T:
    return values[int(draw.integers(len(values)))]
