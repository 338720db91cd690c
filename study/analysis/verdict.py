"""The verdict on each real change: a paired t test over seeds against the mean of the control arms. Needs no torch.

A verdict is given when the planned seeds are finished. Where the number of planned seeds was raised, each number is a
look, and referee.verdict.looks gives the level of its test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ra.arms import control_arms, controls_of, parse_arm
from referee.verdict.design import MARGIN, Design
from referee.verdict.looks import adjusted_for_looks, nominal_levels
from referee.verdict.power import exaggeration
from referee.verdict.statistics import (
    CONFIDENCE,
    NoiseFloor,
    PairedTest,
    VarianceRatio,
    controls_error,
    holm,
    mean,
    paired_t,
    sign_test,
    t_quantile,
    variance_ratio,
)
from runtime import records
from study.hellaswag_scores import EndingsTask, accuracy, common_items, on_common_items
from study.runs import BASELINE, Run

SQUARE = ("B", "RAEARLY", "RALATE", "RAALL")  # the first half of the layers swapped or not, and the second
# Of SQUARE: the effects of swapping the first half and the second, and the effect that only both have.
CONTRASTS = ((-0.5, 0.5, -0.5, 0.5), (-0.5, -0.5, 0.5, 0.5), (0.5, -0.5, -0.5, 0.5))
ENOUGH_DOF = 3  # of either variance, below which their ratio says nothing
ENOUGH_SEEDS = 3  # of a control arm, below which it is not checked

Losses = Mapping[str, Mapping[int, float]]  # variant -> seed -> loss in nats


def control_losses(
    table: Losses,
    seeds: Sequence[int] | None = None,
    arm: str | None = None,
    controls: Sequence[str] = (),
) -> list[list[float]]:
    """Return the losses of the control arms at each of the seeds (default: all).

    arm: whose control arms; None: those of the first control arm. controls: these instead.
    Arms that agree to the last bit are one arm under two names (RALATE and RAALT on two layers) and count once.
    """
    if seeds is None:
        seeds = sorted({seed for by_seed in table.values() for seed in by_seed})
    if arm is None:
        arm = next(iter(control_arms(table)), "")
    arms = [table[name] for name in controls or controls_of(arm, table) if name in table]
    return [list(dict.fromkeys(by_seed[seed] for by_seed in arms if seed in by_seed)) for seed in seeds]


def noise_band(floor: NoiseFloor, controls: Sequence[int]) -> float:
    """Return half the width (nats) of the band that holds a variant without effect in 95 % of studies.

    controls: the number of control arms at each seed. The variant varies like a control arm and is none of them.
    """
    return t_quantile(CONFIDENCE, floor.dof) * controls_error(floor.sigma, controls)


def odd_controls(table: Losses) -> list[str]:
    """Return the control arms that differ from the mean of the others at 5 % (paired t over seeds, Holm).

    They cannot differ by more than chance, so such an arm points to an error in the pipeline.
    """
    tested: dict[str, float] = {}
    for name in control_arms(table):
        others = {other: by_seed for other, by_seed in table.items() if other != name}
        pairs = zip(table[name].values(), control_losses(others, list(table[name]), name), strict=True)
        differences = [loss - mean(arms) for loss, arms in pairs if arms]
        if len(differences) >= ENOUGH_SEEDS:
            tested[name] = paired_t(differences).p_value or 0.0
    adjusted = holm(list(tested.values()))
    return [name for name, p in zip(tested, adjusted, strict=True) if p < 1 - CONFIDENCE]


@dataclass(frozen=True)
class VarianceCheck:
    """F tests whether the control arms vary independently and alike; `enough` data to decide.

    halves: spread of the effects of swapping either half alone. together: of the effect that only both halves have.
    early, late: of the effects of each half. All four are equal if the arms vary independently and alike.
    tests: halves over together, and early over late; empty without spread. adjusted_p: by Holm's method.
    """

    halves: NoiseFloor | None
    together: NoiseFloor | None
    early: NoiseFloor | None
    late: NoiseFloor | None
    tests: tuple[VarianceRatio, ...]
    adjusted_p: tuple[float, ...]
    enough: bool

    @property
    def differs(self) -> bool:
        """Whether an F test finds that the arms vary differently, or not independently."""
        return self.enough and min(self.adjusted_p) < 1 - CONFIDENCE


def variance_check(final: Losses, controls: Sequence[str] = ()) -> VarianceCheck | None:
    """Compare the variances of half-swapped and fully swapped arms; None in a study without all four of SQUARE.

    Swapping no half, the first, the second or both is a 2 x 2 design. Its three contrasts, each scaled to the variance
    of a single run, are independent and of one variance if the four arms vary independently and alike. Arms that agree
    in pairs (B with RALATE, RAEARLY with RAALL) make one half's effect larger than the other's.
    """
    final = {parse_arm(name).attention: final[name] for name in controls or controls_of(BASELINE, final)}
    if not set(SQUARE) <= set(final):
        return None
    seeds = sorted(set.intersection(*(set(final[name]) for name in SQUARE)))
    if not seeds:
        return VarianceCheck(None, None, None, None, (), (), False)
    contrasts = np.array([[final[name][seed] for name in SQUARE] for seed in seeds]) @ np.transpose(CONTRASTS)
    parts = (contrasts[:, :2], contrasts[:, 2:], contrasts[:, 0], contrasts[:, 1])
    halves, together, early, late = (NoiseFloor(math.sqrt(np.mean(part**2)), part.size) for part in parts)
    tests = tuple(filter(None, [variance_ratio(halves, together), variance_ratio(early, late)]))
    adjusted = tuple(holm([test.p_value for test in tests]))
    enough = len(tests) == 2 and len(seeds) >= ENOUGH_DOF
    return VarianceCheck(halves, together, early, late, tests, adjusted, enough)


BETTER = "better"
WORSE = "worse"
EQUIVALENT = "equivalent"
CANNOT_TELL = "cannot tell"
INTERIM = "interim"  # planned seeds are not finished
NO_ANSWER = (CANNOT_TELL, INTERIM)

PRIMARY = "primary"
EXPLORATORY = "exploratory"

VERDICT_SEEDS = 3  # fewer have no verdict
LEVEL = 1 - CONFIDENCE


@dataclass(frozen=True)
class Verdict:
    """A real change against the mean of its control arms at the same seeds.

    word: BETTER, WORSE, EQUIVALENT, CANNOT_TELL or INTERIM. role: PRIMARY or EXPLORATORY. test: of the differences, in
    nats; its intervals hold at all looks together. controls: the number of control arms at each seed.
    adjusted_p, equivalence_p: for the looks, and by Holm's method over the exploratory variants; None without a test.
    margin: in nats, of EQUIVALENT. looks: the planned numbers of seeds, of which the last decides; () where none was
    planned. finished: planned seeds with every run. level: of the t test. callable_from: the smallest difference (nats)
    that is better or worse with this spread. exaggeration: factor by which studies that call a difference better or
    worse report it too large if the true one is half of this estimate.
    """

    variant: str
    word: str
    role: str
    test: PairedTest
    controls: list[int]
    adjusted_p: float | None
    equivalence_p: float | None
    judged_together: int
    margin: float
    looks: tuple[int, ...]
    finished: int
    level: float
    callable_from: float | None = None
    exaggeration: float | None = None

    @property
    def seeds(self) -> int:
        return self.test.difference.count

    @property
    def planned(self) -> int:
        """The seeds that the verdict needs."""
        return max(self.looks[-1] if self.looks else 0, VERDICT_SEEDS)

    @property
    def reads(self) -> tuple[int, ...]:
        """The looks that have enough seeds for a verdict."""
        return tuple(seeds for seeds in self.looks if seeds >= VERDICT_SEEDS)


def judge(
    table: Losses,
    margin: float = MARGIN,
    primary: str = "",
    looks: Mapping[str, tuple[int, ...]] | None = None,
    finished: Mapping[str, int] | None = None,
    first_seed: int = 0,
    controls: Sequence[str] = (),
    higher: bool = False,
) -> list[Verdict]:
    """Judge every real change that has a seed with a control arm.

    table: variant -> seed -> final loss in nats. primary: the planned comparison. looks: variant -> planned seeds.
    finished: variant -> planned seeds with every run; by default those in the table. first_seed: of the planned seeds.
    controls: the control arms of every arm; (): those at the learning rate of the arm. higher: is better.
    """
    looks = looks or {}
    found = []
    for name in (name for name in table if not parse_arm(name).is_control):
        planned = looks.get(name, ())
        seeds = [seed for seed in table[name] if not planned or seed - first_seed < planned[-1]]
        pairs = zip(seeds, control_losses(table, seeds, name, controls), strict=True)
        used = {seed: arms for seed, arms in pairs if arms}
        if used:
            differences = [table[name][seed] - mean(arms) for seed, arms in used.items()]
            done = (finished or {}).get(name, len(used))
            counts = [len(arms) for arms in used.values()]
            found.append(_test(name, differences, counts, margin, planned, done, name == primary))
    return _adjusted(found, higher)


def earlier_verdicts(
    table: Losses,
    margin: float,
    primary: str,
    looks: Mapping[str, tuple[int, ...]],
    first_seed: int = 0,
    controls: Sequence[str] = (),
) -> list[Verdict]:
    """Return the verdicts at the looks before the last one of each variant. Later looks do not withdraw them."""
    found = []
    for count in sorted({seeds for reads in looks.values() for seeds in reads[:-1]}):
        past = {name: tuple(seeds for seeds in reads if seeds <= count) for name, reads in looks.items()}
        known = {
            name: by_seed for name, by_seed in table.items() if parse_arm(name).is_control or past.get(name)
        }
        found += [
            one
            for one in judge(known, margin, primary, past, None, first_seed, controls)
            if one.adjusted_p is not None and one.looks[-1] == count < looks[one.variant][-1]
        ]
    return found


@dataclass(frozen=True)
class TunedVerdicts:
    """The verdicts on arms at tuned learning rates."""

    best: list[Verdict]  # each arm against the control arms, each at its rate; confirmed by the next two
    earlier: list[Verdict]  # at the looks before the last
    common: list[Verdict]  # both at the rate of the control arms
    same: list[Verdict]  # both at the rate of the arm
    unconfirmed: dict[str, str]  # arm -> the word that `best` alone would have


def judge_tuned(
    table: Losses, design: Design, looks: Mapping[str, tuple[int, ...]], finished: Mapping[str, int]
) -> TunedVerdicts:
    """Judge the arms of a design with tuned rates, and those that were added. table: with the arms at other rates."""
    names = dict.fromkeys((*design.arms, *looks))
    arms = {name: table[name] for name in names if name in table}
    controls = {name: table[name] for name in design.controls if name in table}
    common = {name: table[twin] for name in names if (twin := at_rate_of_controls(name, design)) in table}
    all_controls = {name: table[name] for name in control_arms(table)}
    tables = (
        (controls | arms, design.controls),
        (controls | common, design.controls),
        (all_controls | arms, ()),
    )
    settings, first = (design.margin, design.primary, looks), design.seeds[0]
    best, at_common, same = (judge(one, *settings, finished, first, against) for one, against in tables)
    confirmed = confirm(best, at_common, same)
    return TunedVerdicts(
        confirmed,
        confirm(*(earlier_verdicts(one, *settings, first, against) for one, against in tables)),
        at_common,
        same,
        {one.variant: one.word for one, now in zip(best, confirmed, strict=True) if one.word != now.word},
    )


def at_rate_of_controls(name: str, design: Design) -> str:
    """Return the name of an arm at the tuned rate of the control arms; the arm where there is none."""
    return parse_arm(name).with_rate(parse_arm(design.controls[0]).rate).name if design.controls else name


def confirm(best: Iterable[Verdict], common: Iterable[Verdict], same: Iterable[Verdict]) -> list[Verdict]:
    """Return the verdicts at the best rates. Better or worse that does not hold at one rate is "cannot tell"."""
    needed = {
        word: {(one.variant, one.looks) for one in verdicts if one.word == word}
        for word, verdicts in ((BETTER, same), (WORSE, common))
    }
    return [
        replace(one, word=CANNOT_TELL, callable_from=None, exaggeration=None)
        if one.word in needed and (one.variant, one.looks) not in needed[one.word]
        else one
        for one in best
    ]


def _test(
    name: str,
    differences: list[float],
    controls: list[int],
    margin: float,
    planned: tuple[int, ...],
    finished: int,
    primary: bool,
) -> Verdict:
    """Test one variant alone, before Holm's method. A look with too few seeds for a verdict counts as none."""
    read = tuple(seeds for seeds in planned if seeds >= VERDICT_SEEDS)
    decided = len(differences) >= VERDICT_SEEDS and (not planned or finished >= planned[-1])
    level, narrow = (nominal_levels(read, one)[-1] if read else one for one in (LEVEL, 2 * LEVEL))
    test = paired_t(differences, level, narrow)
    p_value = adjusted_for_looks(test.p_value or 0.0, read)
    outside = adjusted_for_looks(min(1.0, 2 * test.p_outside(margin)), read) / 2
    return Verdict(
        variant=name,
        word=CANNOT_TELL if not planned or finished >= planned[-1] else INTERIM,
        role=PRIMARY if primary else EXPLORATORY,
        test=test,
        controls=controls,
        adjusted_p=p_value if decided else None,
        equivalence_p=outside if decided else None,
        judged_together=1,
        margin=margin,
        looks=planned,
        finished=finished,
        level=level,
    )


def _adjusted(verdicts: list[Verdict], higher: bool) -> list[Verdict]:
    """Adjust the exploratory variants by Holm's method and choose the words. An interim variant counts as a test."""
    family = [
        one
        for one in verdicts
        if one.role == EXPLORATORY and (one.adjusted_p is not None or one.word == INTERIM)
    ]
    differ, outside = (
        holm([1.0 if p is None else p for p in values])
        for values in ([one.adjusted_p for one in family], [one.equivalence_p for one in family])
    )
    adjusted = {one.variant: (p, q) for one, p, q in zip(family, differ, outside, strict=True)}
    found = []
    for one in verdicts:
        if one.role == EXPLORATORY:
            one = replace(one, judged_together=len(family))
        if one.adjusted_p is not None:
            p, q = adjusted.get(one.variant, (one.adjusted_p, one.equivalence_p))
            one = _decided(replace(one, adjusted_p=p, equivalence_p=q), higher)
        found.append(one)
    return found


def _decided(verdict: Verdict, higher: bool) -> Verdict:
    """Choose the word: better or worse at 5 %; else equivalent if two one-sided 5 % tests find it within the margin."""
    p, q = verdict.adjusted_p, verdict.equivalence_p
    if p is None or p >= LEVEL:
        return replace(verdict, word=EQUIVALENT) if q is not None and q < LEVEL else verdict
    mean_difference, dof = verdict.test.difference.mean, verdict.seeds - 1
    error = (verdict.test.spread or 0.0) / math.sqrt(verdict.seeds)
    return replace(
        verdict,
        word=BETTER if (mean_difference > 0) == higher else WORSE,
        callable_from=t_quantile(1 - verdict.level, dof) * error,
        exaggeration=exaggeration(abs(mean_difference) / error / 2, dof, verdict.level) if error else 1.0,
    )


# Paired tests by item of four endings.
#
# They compare trained models on the same questions and say nothing about another seed. Runs without the values of the
# items are left out. Needs no torch.


MOST_SEEDS = 20  # whose files are read: more seeds answer the same items
Answers = NDArray[np.int_]


@dataclass(frozen=True)
class ItemTest:
    """Items on which the variant was right more often than the baseline, and less often; McNemar's exact test.

    With several seeds the test is of the sign of each item's net score. Adjusted by Holm over the variants.
    """

    task: str  # key of the task
    variant: str
    measure: str
    seeds: list[int]
    items: int
    wins: int
    losses: int
    p_value: float
    adjusted_p: float


def item_tests(
    study_dir: Path, used: Sequence[Run], task: EndingsTask, baseline: str = BASELINE
) -> list[ItemTest]:
    """Test each variant against the baseline at the same seeds, for each measure, on the items of most runs."""
    used = on_common_items(used, task, common_items(used, task))
    seeds = [run.seed for run in used if run.variant == baseline][:MOST_SEEDS]
    answers = {(run.variant, run.seed): _answers(study_dir, run, task) for run in used if run.seed in seeds}
    tests = []
    for measure in task.measures:
        net: dict[str, dict[int, Answers]] = {}  # variant -> seed -> variant minus baseline, item by item
        for (variant, seed), right in answers.items():
            base = answers[baseline, seed].get(measure)
            if variant != baseline and seed is not None and base is not None and measure in right:
                net.setdefault(variant, {})[seed] = right[measure] - base
        found = [(name, list(by_seed), sum(by_seed.values())) for name, by_seed in net.items()]
        results = [sign_test(np.asarray(score).tolist()) for _, _, score in found]
        adjusted = holm([result.p_value for result in results])
        for (variant, tested, score), result, p in zip(found, results, adjusted, strict=True):
            counts = (np.size(score), result.wins, result.losses)
            tests.append(ItemTest(task.key, variant, measure, tested, *counts, result.p_value, p))
    return tests


def _answers(study_dir: Path, run: Run, task: EndingsTask) -> dict[str, Answers]:
    """Measure -> 1 for each right item and 0 for each wrong one, where the run has them."""
    rows = {measure: accuracy(run, task, measure) for measure in task.measures}
    folder = run.file(study_dir, "")
    found = {measure: records.read_items(folder, row) for measure, row in rows.items() if row}
    return {measure: right.astype(int) for measure, right in found.items() if right is not None}
