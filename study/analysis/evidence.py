"""What a study can and cannot show: the effect it can see, the seeds an effect needs, whether the arms vary alike, and
paired tests by item and by window from the files beside the records.

The tests by item and by window compare trained models on the same questions and texts: they say nothing of what
another seed would give. Files that are missing, torn or of another evaluation are left out. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.records.hellaswag_scores import common_items, scored_items
from study.records.runs import BASELINE, Run
from study.stats.power import Design, against_arms, all_detect, seeds_for
from study.stats.statistics import (
    CONFIDENCE,
    Interval,
    NoiseFloor,
    VarianceRatio,
    against_arms_error,
    holm,
    mean,
    mean_interval,
    sign_test,
    t_quantile,
    variance_ratio,
)

PERCENT = (0.5, 1.0, 2.0, 5.0)  # of perplexity: the effects whose seeds are counted
SQUARE = ("B", "RAEARLY", "RALATE", "RAALL")  # the first half of the layers swapped or not, and the second
ENOUGH = 3  # degrees of freedom on either side, below which a ratio of variances says nothing
MOST_SEEDS = 20  # whose files by item and by window are read: more seeds have the same items and windows
MEASURES = {"correct": "acc", "correct_norm": "acc_norm"}

Losses = dict[str, dict[int, float]]  # variant -> seed -> loss in nats


@dataclass(frozen=True)
class Planned:
    """To see a change of so many percent: seeds in all (None: beyond any plan), more than at hand, hours for those."""

    percent: float
    effect: float
    seeds: int | None
    more: int | None
    hours: float | None


@dataclass(frozen=True)
class Sensitivity:
    """The smallest effect (nats) seen with 80 % power at the seeds at hand, and the seeds that others need.

    noise: half the width (nats) of the band in which the difference of a variant without effect to the mean of the
    arms lies in 95 % of studies, if it varies as they do. wider: a variant that was seen to vary more than they do,
    whose own spread has to show the effect as well.
    """

    seeds: int
    arms: int
    dof: int
    noise: float
    smallest: float
    seed_hours: float | None  # of all variants at one seed, by the runs' own clocks
    planned: list[Planned]
    wider: str | None = None


@dataclass(frozen=True)
class Spread:
    """Whether half-swapped arms differ from the baseline as much as the fully swapped one; `enough` data to tell.

    halves: spread of what swapping either half changes by itself; together: of what only both halves make. A half
    swap moves the loss with the variance of one of each, a full swap with twice that of `halves`: they are alike
    where the two spreads are one.
    """

    halves: NoiseFloor | None
    together: NoiseFloor | None
    test: VarianceRatio | None
    enough: bool


@dataclass(frozen=True)
class ItemTest:
    """Items on which the variant was right more often than the baseline, and less often; McNemar's exact test.

    With several seeds an item's net score over them has its sign tested. Adjusted by Holm over the variants.
    """

    variant: str
    measure: str
    seeds: list[int]
    items: int
    wins: int
    losses: int
    p_value: float
    adjusted_p: float


@dataclass(frozen=True)
class WindowDifference:
    """The variant minus the baseline, in nats a token, window by window; the interval is that of the windows."""

    variant: str
    seeds: list[int]
    windows: int
    difference: Interval


@dataclass(frozen=True)
class Evidence:
    sensitivity: Sensitivity | None
    spread: Spread
    items: list[ItemTest]
    windows: list[WindowDifference]


def gather(
    study_dir: Path,
    used: Sequence[Run],
    compared: Sequence[Run],
    final: Losses,
    arms: list[int],
    floor: NoiseFloor | None,
    wider: tuple[str, float] | None = None,
) -> Evidence:
    """compared: the used runs that can be compared at their end; final: their losses.

    floor: the noise of the equivalent arms. arms: how many of those there are at each seed of the comparison that
    has the fewest. wider: see `sensitivity`.
    """
    return Evidence(
        sensitivity=sensitivity(arms, floor, seed_hours(used), wider),
        spread=spread(final),
        items=item_tests(study_dir, compared),
        windows=window_differences(study_dir, compared),
    )


def seed_hours(used: Sequence[Run]) -> float | None:
    """Hours that one seed of every variant takes, evaluation and the rest included; None where no clock is known."""
    by_variant: dict[str, list[float]] = {}
    for run in used:
        clock = run.record["clock"]
        if clock:
            by_variant.setdefault(run.variant, []).append(math.fsum(value or 0.0 for value in clock.values()))
    return math.fsum(mean(seconds) for seconds in by_variant.values()) / 3600 if by_variant else None


def sensitivity(
    arms: list[int], floor: NoiseFloor | None, hours: float | None, wider: tuple[str, float] | None = None
) -> Sensitivity | None:
    """What the verdict's rule can see. arms: how many equivalent arms each seed has.

    wider: the variant that was seen to vary most beyond the arms, and the standard deviation (nats) of its
    differences over seeds. The measured spreads are taken for the true ones.
    """
    seeds, design = len(arms), against_arms(floor.sigma, arms, floor.dof) if floor else None
    if floor is None or design is None or floor.sigma <= 0:
        return None
    tests = [design]
    if wider and seeds > 1:
        tests.append(Design(wider[1], 1, 1))
    smallest = all_detect(tests, seeds)
    if smallest is None:
        return None
    planned = []
    for percent in PERCENT:
        effect = math.log1p(percent / 100)
        needed = seeds if smallest <= effect else seeds_for(tests, effect)
        more = None if needed is None else needed - seeds
        cost = None if more is None or hours is None else more * hours
        planned.append(Planned(percent, effect, needed, more, cost))
    noise = t_quantile(CONFIDENCE, floor.dof) * against_arms_error(floor.sigma, arms)
    name = wider[0] if wider and len(tests) > 1 else None
    return Sensitivity(seeds, max(arms), floor.dof, noise, smallest, hours, planned, name)


def spread(final: Losses) -> Spread:
    """Whether half-swapped arms lie as far from the baseline as the fully swapped one, at the seeds that have all four.

    Swapping no half, the first, the second or both is a 2 x 2 design: its three contrasts, each scaled to the variance
    of a single run, are independent and of one variance if the four arms vary independently and alike.
    """
    square = [final.get(name, {}) for name in SQUARE]
    seeds = sorted(set.intersection(*(set(own) for own in square)))
    alone, both = [], []
    for seed in seeds:
        none, first, second, all_ = (own[seed] for own in square)
        alone += [(first + all_ - none - second) / 2, (second + all_ - none - first) / 2]
        both.append((none + all_ - first - second) / 2)

    def about_zero(contrasts: list[float]) -> NoiseFloor | None:
        squares = math.fsum(value**2 for value in contrasts)
        return NoiseFloor(math.sqrt(squares / len(contrasts)), len(contrasts)) if contrasts else None

    halves, together = about_zero(alone), about_zero(both)
    test = variance_ratio(halves, together) if halves and together else None
    return Spread(halves, together, test, test is not None and min(test.dof) >= ENOUGH)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _pairs(used: Sequence[Run], read: Callable[[Run], list[float]]) -> dict[str, dict[int, list[float]]]:
    """variant -> seed -> variant minus baseline, place by place; of the baseline's first seeds, all of one length."""
    base: dict[int, list[float]] = {}
    for run in (run for run in used if run.variant == BASELINE):
        values = read(run) if len(base) < MOST_SEEDS else []
        if values and run.seed is not None and len(values) == len(next(iter(base.values()), values)):
            base[run.seed] = values
    found: dict[str, dict[int, list[float]]] = {}
    for run in used:
        if run.variant != BASELINE and run.seed in base:
            values, other = read(run), base[run.seed]
            if len(values) == len(other):
                found.setdefault(run.variant, {})[run.seed] = [
                    a - b for a, b in zip(values, other, strict=True)
                ]
    return found


def _over_seeds(by_seed: dict[int, list[float]]) -> list[float]:
    """The sum over seeds at each place."""
    return [math.fsum(column) for column in zip(*by_seed.values(), strict=True)]


def item_tests(study_dir: Path, used: Sequence[Run]) -> list[ItemTest]:
    """Each variant against the baseline at the same seeds, for each measure; of the runs scored on the same items."""
    common = common_items([run.record for run in used])
    used = [run for run in used if common and scored_items(run.record) == common]
    files: dict[str, dict[str, Any]] = {}

    def right(run: Run, key: str) -> list[float]:
        if run.name not in files:
            files[run.name] = _read(run.file(study_dir, "hellaswag.json"))
        values, scored = files[run.name].get(key), run.record["hellaswag"] or {}
        if not isinstance(values, list) or set(map(type, values)) != {bool}:
            return []
        same = (
            len(values) == scored.get("items")
            and abs(sum(values) / len(values) - scored[MEASURES[key]]) < 1e-6
        )
        return values if same else []

    tests = []
    for key, measure in MEASURES.items():
        results = {
            variant: (by_seed, sign_test(_over_seeds(by_seed)))
            for variant, by_seed in _pairs(used, lambda run, key=key: right(run, key)).items()  # type: ignore[misc]
        }
        adjusted = holm([result.p_value for _, result in results.values()])
        for (variant, (by_seed, result)), p in zip(results.items(), adjusted, strict=True):
            items = len(next(iter(by_seed.values())))
            tests.append(
                ItemTest(
                    variant, measure, list(by_seed), items, result.wins, result.losses, result.p_value, p
                )
            )
    return tests


def window_differences(study_dir: Path, used: Sequence[Run]) -> list[WindowDifference]:
    """Each variant against the baseline at the same seeds, on the same windows."""

    def window_losses(run: Run) -> list[float]:
        seen = _read(run.file(study_dir, "validation_windows.json"))
        values = seen.get("losses")
        if seen.get("tokens") != run.record["progress"]["tokens"] or not isinstance(values, list):
            return []
        return values if set(map(type, values)) == {float} and math.isfinite(sum(values)) else []

    found = []
    for variant, by_seed in _pairs(used, window_losses).items():
        sums = _over_seeds(by_seed)
        differences = [value / len(by_seed) for value in sums]
        found.append(WindowDifference(variant, list(by_seed), len(sums), mean_interval(differences)))
    return found
