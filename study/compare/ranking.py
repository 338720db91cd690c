"""Rank a study's variants as far as noise permits, and compare the rankings of several studies.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

from ra.names import is_control_arm
from referee.verdict.looks import adjusted_for_looks
from referee.verdict.statistics import Interval, holm, mean, mean_interval, paired_t
from study.analysis.verdict import BETTER, INTERIM, VERDICT_SEEDS, WORSE, Verdict
from study.compare.loaded_studies import LoadedStudy
from study.runs import variant_order

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


@dataclass
class VariantRank:
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

    why_not: why there is no place, else empty.
    """

    study: str
    seeds: list[int]
    places: list[VariantRank]
    why_not: str
    left_out: list[str]


@dataclass
class Across:
    """A variant among those that all studies have: its places (low, high) in each, None where it has none."""

    variant: str
    control: bool
    places: list[tuple[int, int] | None]
    agreement: str


def rank(study: LoadedStudy, among: Collection[str] | None = None) -> Ranking:
    """Order the variants (those in `among`) by mean loss, with the places that noise permits each.

    Control arms are one class: they share a mean and their places. A real change is apart from the class by the
    report's verdict, and from another real change by a paired t test over the seeds, adjusted for looks and by Holm
    over the pairs; in both cases only towards the side on which its mean lies, and from VERDICT_SEEDS on.
    """
    report = study.report
    table: Losses = {name: {} for name in report.variants if among is None or name in among}
    for (name, seed), run in study.runs().items():
        if name in table and run.name not in report.cut:
            table[name][seed] = run.record.validation.loss
    seeds = _seeds(table)
    ranked = [name for name in table if seeds and table[name].keys() >= set(seeds)]
    why_not = "" if len(seeds) > 1 else NO_ORDER if seeds else ALL_CUT
    places = [] if why_not else _places(ranked, seeds, table, report.verdicts)
    return Ranking(study.label, seeds, places, why_not, [name for name in table if name not in ranked])


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
) -> list[VariantRank]:
    losses = {name: [table[name][seed] for seed in seeds] for name in ranked}
    arms = [mean(values) for name, values in losses.items() if is_control_arm(name)]
    level = {name: mean(arms if is_control_arm(name) else values) for name, values in losses.items()}
    better = {(x, y) for x, y in _better(losses, verdicts) if level[x] < level[y]}
    order = sorted(ranked, key=lambda name: (level[name], is_control_arm(name), mean(losses[name])))
    places = []
    for place, name in enumerate(order, 1):
        better_than = [other for other in ranked if (name, other) in better]
        worse_than = [other for other in ranked if (other, name) in better]
        places.append(
            VariantRank(
                variant=name,
                control=is_control_arm(name),
                loss=mean_interval(losses[name]),
                place=place,
                low=1 + len(worse_than),
                high=len(ranked) - len(better_than),
                better_than=better_than,
                worse_than=worse_than,
            )
        )
    return places


def _better(losses: dict[str, list[float]], verdicts: Sequence[Verdict]) -> set[tuple[str, str]]:
    """Pairs of which the tests call the first better than the second."""
    words = {verdict.variant: verdict.word for verdict in verdicts}
    looks = {verdict.variant: verdict.reads for verdict in verdicts}
    real = [name for name in losses if not is_control_arm(name)]
    found = set()
    for name in real:
        for arm in (other for other in losses if is_control_arm(other)):
            found |= {BETTER: {(name, arm)}, WORSE: {(arm, name)}}.get(words.get(name, ""), set())
    pairs = list(combinations([name for name in real if words.get(name) != INTERIM], 2))
    tests = [paired_t([a - b for a, b in zip(losses[x], losses[y], strict=True)]) for x, y in pairs]
    raw = [1.0 if test.p_value is None else test.p_value for test in tests]
    reads = [max(looks.get(x, ()), looks.get(y, ()), key=len) for x, y in pairs]
    adjusted = holm([adjusted_for_looks(p, read) for p, read in zip(raw, reads, strict=True)])
    for (x, y), test, p in zip(pairs, tests, adjusted, strict=True):
        if p < LEVEL and test.difference.count >= VERDICT_SEEDS:
            found.add((x, y) if test.difference.mean < 0 else (y, x))
    return found


def across(studies: Sequence[LoadedStudy]) -> list[Across]:
    """Rank the variants that all studies have, within each study and among these variants alone."""
    shared = sorted(set.intersection(*(set(study.report.variants) for study in studies)), key=variant_order)
    tables = [{place.variant: place for place in rank(study, shared).places} for study in studies]
    return [
        Across(
            variant=name,
            control=is_control_arm(name),
            places=[(place.low, place.high) if (place := table.get(name)) else None for table in tables],
            agreement=_agreement(name, shared, [table for table in tables if name in table]),
        )
        for name in shared
    ]


def _agreement(name: str, shared: Sequence[str], ranked: Sequence[dict[str, VariantRank]]) -> str:
    """Whether the variant differs from the same others, in the same direction, in the studies that rank it."""
    if len(ranked) < 2:
        return ALONE
    signs = [
        {(x in table[name].worse_than) - (x in table[name].better_than) for table in ranked if x in table}
        for x in shared
    ]
    if any({-1, 1} <= found for found in signs):
        return CONTRADICT
    if all(found <= {0} for found in signs):
        return NONE
    return AGREE if all(len(found) <= 1 for found in signs) else SOME
