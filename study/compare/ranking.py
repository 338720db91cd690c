"""Order the variants that all studies have, as far as noise permits, and compare the orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ra.arms import control_arms, control_groups, controls_of, parse_arm
from referee.verdict.looks import adjusted_for_looks
from referee.verdict.statistics import holm, mean, paired_t
from study.analysis.verdict import BETTER, INTERIM, NO_ANSWER, VERDICT_SEEDS, WORSE, Verdict
from study.compare.loaded_studies import LoadedStudy
from study.runs import variant_order

NO_ORDER = "one seed: no order"
ALL_CUT = "no run ended its schedule: no order"
LEVEL = 0.05  # of a test, after Holm

# Whether studies agree on a variant.
AGREE = "agree"
CONTRADICT = "contradict each other"
SOME = "no contradiction"
NONE = "no study can tell"
ALONE = "-"  # fewer than two studies have it

Losses = dict[str, dict[int, float]]  # variant -> seed -> final loss in nats


@dataclass(frozen=True)
class Order:
    """The shared variants within one study, over seeds that all the ranked ones have."""

    study: str
    seeds: list[int]
    ranked: list[str]
    better: list[tuple[str, str]]  # of each pair the first is better, beyond noise
    why_not: str  # the reason for no order, else empty

    def places(self, name: str) -> tuple[int, int] | None:
        """The first and the last place that noise permits; None for a variant that is not ranked."""
        if name not in self.ranked:
            return None
        above = sum(worse == name for _, worse in self.better)
        below = sum(better == name for better, _ in self.better)
        return 1 + above, len(self.ranked) - below

    def sign(self, name: str, other: str) -> int:
        """-1 if the variant is better than the other, 1 if worse, 0 if noise permits both."""
        return ((other, name) in self.better) - ((name, other) in self.better)


@dataclass(frozen=True)
class Across:
    """A variant that all studies have: its places (low, high) in each, None where it has none."""

    variant: str
    control: bool
    places: list[tuple[int, int] | None]
    agreement: str


def order(study: LoadedStudy, names: Sequence[str]) -> Order:
    """Order these variants by mean loss as far as noise permits.

    Control arms are one class and share their mean. A real change is apart from the class by the report's verdict,
    and from another real change by a paired t test over the seeds, adjusted for looks and by Holm over the pairs; in
    both cases only towards the side on which its mean lies, and from VERDICT_SEEDS on.
    """
    table: Losses = {name: {} for name in names}
    for (name, seed), run in study.runs().items():
        if name in table and run.name not in study.report.cut:
            table[name][seed] = run.record.validation.loss
    seeds = _seeds(table)
    if len(seeds) < 2:
        return Order(study.label, seeds, [], [], NO_ORDER if seeds else ALL_CUT)
    losses = {name: [row[at] for at in seeds] for name, row in table.items() if row.keys() >= set(seeds)}
    return Order(study.label, seeds, list(losses), better_pairs(losses, study.report.verdicts), "")


def _seeds(table: Losses) -> list[int]:
    """Choose the seeds to rank over: two or more if possible, then most variants, then most seeds."""
    sets = [frozenset(losses) for losses in table.values()]
    if not sets:
        return []

    def worth(seeds: frozenset[int]) -> tuple[bool, int, int, list[int]]:
        return (
            len(seeds) > 1,
            bool(seeds) * sum(seeds <= other for other in sets),
            len(seeds),
            sorted(seeds),
        )

    best = max([*sets, sets[0].intersection(*sets)], key=worth)
    return sorted(best)


def better_pairs(losses: dict[str, list[float]], verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """Return the pairs of which the tests and the means call the first better than the second."""
    words = {verdict.variant: verdict.word for verdict in verdicts}
    looks = {verdict.variant: verdict.reads for verdict in verdicts}
    arms = control_arms(losses)
    real = [name for name in losses if name not in arms]
    against = [(name, arm) for name in real for arm in controls_of(name, arms)]
    found = [(name, arm) for name, arm in against if words.get(name) == BETTER]
    found += [(arm, name) for name, arm in against if words.get(name) == WORSE]
    pairs = list(combinations([name for name in real if words.get(name) != INTERIM], 2))
    tests = [paired_t([a - b for a, b in zip(losses[x], losses[y], strict=True)]) for x, y in pairs]
    raw = [1.0 if test.p_value is None else test.p_value for test in tests]
    reads = [max(looks.get(x, ()), looks.get(y, ()), key=len) for x, y in pairs]
    adjusted = holm([adjusted_for_looks(p, read) for p, read in zip(raw, reads, strict=True)])
    for (x, y), test, p in zip(pairs, tests, adjusted, strict=True):
        if p < LEVEL and test.difference.count >= VERDICT_SEEDS:
            found.append((x, y) if test.difference.mean < 0 else (y, x))
    level = {name: mean(values) for name, values in losses.items()}
    for group in control_groups(arms):
        level |= dict.fromkeys(group, mean([level[name] for name in group]))
    return [(x, y) for x, y in found if level[x] < level[y]]


def across(studies: Sequence[LoadedStudy]) -> tuple[list[Order], list[Across]]:
    """Order the variants that all studies have within each study; say whether the studies agree on each."""
    shared = sorted(set.intersection(*(set(study.report.variants) for study in studies)), key=variant_order)
    orders = [order(study, shared) for study in studies]
    rows = [
        Across(
            name, parse_arm(name).is_control, [one.places(name) for one in orders], _agreement(name, orders)
        )
        for name in shared
    ]
    return orders, rows


def _agreement(name: str, orders: Sequence[Order]) -> str:
    """Whether the variant differs from the same others, in the same direction, in the studies that rank it."""
    ranked = [one for one in orders if name in one.ranked]
    others = {other for one in ranked for other in one.ranked}
    signs = [{one.sign(name, other) for one in ranked if other in one.ranked} for other in others]
    if len(ranked) < 2:
        return ALONE
    if any({-1, 1} <= found for found in signs):
        return CONTRADICT
    if all(found <= {0} for found in signs):
        return NONE
    return AGREE if all(len(found) <= 1 for found in signs) else SOME


def verdict_agreement(words: Sequence[str]) -> str:
    """Whether the verdicts of studies on one variant agree."""
    if len(words) < 2:
        return ALONE
    if {BETTER, WORSE} <= set(words):
        return CONTRADICT
    if set(words) <= set(NO_ANSWER):
        return NONE
    return AGREE if len(set(words)) == 1 else SOME
