"""Rank a study's variants as far as noise permits, and compare the rankings of several studies.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ra.names import PATTERNS, is_control_arm
from study.analysis.verdict import BETTER, VERDICT_SEEDS, WORSE, Verdict
from study.compare.load import LoadedStudy
from study.stats.statistics import Interval, NoiseFloor, holm, mean, mean_interval, paired_t

NO_ORDER = "one seed: no ranking"
ALL_CUT = "no run ended its schedule: no ranking"
LEVEL = 0.05  # of a test, after Holm

# Whether studies agree on the place of a variant among the others.
AGREE = "agree"
CONTRADICT = "contradict each other"
SOME = "no contradiction: not every study can tell"
NONE = "no study can tell"
ALONE = "-"  # fewer than two studies rank it

Losses = dict[str, dict[int, float]]  # variant -> seed -> final loss in nats
Signs = dict[
    tuple[str, str], int
]  # -1: the first has the lower loss beyond noise, 1: the higher; else absent


@dataclass
class Place:
    """A variant within one study. low to high: the places that noise permits; place, the observed one, is among them.

    better_than and worse_than: the variants from which it differs.
    """

    variant: str
    control: bool
    loss: Interval
    place: int
    low: int
    high: int
    better_than: list[str]
    worse_than: list[str]


@dataclass
class Ranking:
    """One study's order, over seeds that all the variants in it have; other variants are left out, by name.

    why_not: why there is no place, else empty. cut: runs that the report excludes as well, since they were cut short.
    verdicts: those of the report.
    """

    study: str
    seeds: list[int]
    places: list[Place]
    why_not: str
    left_out: list[str]
    cut: list[str]
    floor: NoiseFloor | None
    verdicts: list[Verdict]


@dataclass
class Across:
    """A variant among those that all studies have: its places (low, high) in each, None where it has none."""

    variant: str
    control: bool
    places: list[tuple[int, int] | None]
    agreement: str


def ordered(names: Iterable[str]) -> list[str]:
    """The variants as the project lists them, others after them by name."""
    order = list(PATTERNS)
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def rank(study: LoadedStudy, among: Collection[str] | None = None) -> Ranking:
    """Order the variants (those in `among`) by mean loss, with the places that noise permits each.

    Control arms are one class: they share a mean and their places. A real change is apart from the class by the
    report's verdict, and from another real change by a paired t test over the seeds, adjusted by Holm over the pairs;
    in both cases only towards the side on which its mean lies, and from VERDICT_SEEDS on.
    """
    names = ordered(study.variants if among is None else study.variants & set(among))
    table = {name: _final_losses(study, name) for name in names}
    seeds = _seeds(table)
    ranked = [name for name in names if seeds and table[name].keys() >= set(seeds)]
    why_not = "" if len(seeds) > 1 else NO_ORDER if seeds else ALL_CUT
    return Ranking(
        study=study.label,
        seeds=seeds,
        places=[] if why_not else _places(ranked, seeds, table, study.report.verdicts),
        why_not=why_not,
        left_out=[name for name in names if name not in ranked],
        cut=list(study.report.cut),
        floor=study.report.floor,
        verdicts=study.report.verdicts,
    )


def _final_losses(study: LoadedStudy, variant: str) -> dict[int, float]:
    """Final losses of the variant by seed, without the runs that were cut short."""
    return {
        seed: float(member.record.validation.loss)
        for (name, seed), member in study.keyed().items()
        if name == variant and member.run.name not in study.report.cut
    }


def _seeds(table: Losses) -> list[int]:
    """Choose the seeds to rank over: two or more if possible, then most variants, then most seeds."""
    sets = [frozenset(losses) for losses in table.values()]
    if not sets:
        return []

    def worth(seeds: frozenset[int]) -> tuple[bool, int, int, list[int]]:
        return len(seeds) > 1, bool(seeds) * sum(seeds <= other for other in sets), len(seeds), sorted(seeds)

    best = max([*sets, sets[0].intersection(*sets)], key=worth)
    return sorted(best)


def _places(
    ranked: Sequence[str], seeds: Sequence[int], table: Losses, verdicts: Sequence[Verdict]
) -> list[Place]:
    losses = {name: [table[name][seed] for seed in seeds] for name in ranked}
    signs = _signs(losses, {verdict.variant: verdict for verdict in verdicts})
    level = _levels(losses)
    order = sorted(ranked, key=lambda name: (level[name], is_control_arm(name), mean(losses[name])))
    return [
        Place(
            variant=name,
            control=is_control_arm(name),
            loss=mean_interval(losses[name]),
            place=place,
            low=1 + sum(signs.get((name, other)) == 1 for other in ranked),
            high=len(ranked) - sum(signs.get((name, other)) == -1 for other in ranked),
            better_than=[other for other in ranked if signs.get((name, other)) == -1],
            worse_than=[other for other in ranked if signs.get((name, other)) == 1],
        )
        for place, name in enumerate(order, 1)
    ]


def _levels(losses: dict[str, list[float]]) -> dict[str, float]:
    """The mean loss of each variant. A control arm has the mean of its class."""
    arms = [mean(values) for name, values in losses.items() if is_control_arm(name)]
    return {name: mean(arms) if is_control_arm(name) else mean(values) for name, values in losses.items()}


def _signs(losses: dict[str, list[float]], verdicts: dict[str, Verdict]) -> Signs:
    """Signs of each pair in both orders, where the means over these seeds agree with the test."""
    level = _levels(losses)
    real = [name for name in losses if not is_control_arm(name)]
    signs: Signs = {}
    for name in real:
        word = verdicts[name].word if name in verdicts else ""
        if word in (BETTER, WORSE):
            sign = -1 if word == BETTER else 1
            signs |= {(name, other): sign for other in losses if is_control_arm(other)}
    pairs = list(combinations(real, 2))
    tests = [paired_t([a - b for a, b in zip(losses[x], losses[y], strict=True)]) for x, y in pairs]
    adjusted = holm([1.0 if test.p_value is None else test.p_value for test in tests])
    for pair, test, p in zip(pairs, tests, adjusted, strict=True):
        if p < LEVEL and test.difference.count >= VERDICT_SEEDS:
            signs[pair] = -1 if test.difference.mean < 0 else 1
    signs = {(x, y): sign for (x, y), sign in signs.items() if sign * (level[x] - level[y]) > 0}
    return signs | {(y, x): -sign for (x, y), sign in signs.items()}


def across(studies: Sequence[LoadedStudy]) -> list[Across]:
    """Rank the variants that all studies have, within each study and among these variants alone."""
    shared = set.intersection(*(study.variants for study in studies))
    tables = [{place.variant: place for place in rank(study, shared).places} for study in studies]
    found = []
    for name in ordered(shared):
        places = [table.get(name) for table in tables]
        found.append(
            Across(
                variant=name,
                control=is_control_arm(name),
                places=[(place.low, place.high) if place else None for place in places],
                agreement=_agreement(name, shared, tables),
            )
        )
    return found


def _agreement(name: str, shared: Collection[str], tables: Sequence[dict[str, Place]]) -> str:
    """Whether the variant differs from the same others, in the same direction, in the studies that rank it."""
    ranked = [table for table in tables if name in table]
    if len(ranked) < 2:
        return ALONE
    said = []
    for other in sorted(shared):
        signs = {
            (other in table[name].worse_than) - (other in table[name].better_than)
            for table in ranked
            if other in table
        }
        said.append(signs)
    if any({-1, 1} <= signs for signs in said):
        return CONTRADICT
    if all(signs <= {0} for signs in said):
        return NONE
    return AGREE if all(len(signs) <= 1 for signs in said) else SOME
