"""The part of a report on learning rates, from the records alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ra.arms import control_arms, parse_arm
from referee.verdict.statistics import mean
from study.analysis.verdict import (
    BETTER,
    CANNOT_TELL,
    WORSE,
    Losses,
    Verdict,
    control_losses,
    earlier_verdicts,
    judge,
)
from study.experiment import Design
from study.plan_file import LearningRates
from study.rate_tuning import RateRun, SortedRuns, losses_of
from study.runs import PENDING, Run, final_losses, variant_order
from study.study_settings import edge, mean_losses


@dataclass(frozen=True)
class RateVerdicts:
    """best: the verdicts, each arm at its rate. earlier: at the looks before the last.

    common: every arm at the rate of the control arms. same: each arm and the control arms at the rate of the arm.
    unconfirmed: arm -> the word that its best rate alone would have.
    """

    best: list[Verdict]
    earlier: list[Verdict]
    common: list[Verdict]
    same: list[Verdict]
    unconfirmed: dict[str, str]


def judge_rates(found: SortedRuns, design: Design, margin: float) -> RateVerdicts:
    """Judge the arms at their rates. design: with the finished seeds of `finished_seeds`."""
    best, common, same = loss_tables(found)

    def at_looks(table: Losses) -> list[Verdict]:
        return earlier_verdicts(table, margin, design.arm, design.looks)

    at_best, at_common, at_same = (
        judge(table, margin, design.arm, design.looks, design.finished) for table in (best, common, same)
    )
    confirmed = confirm(at_best, at_common, at_same)
    pairs = zip(at_best, confirmed, strict=True)
    return RateVerdicts(
        confirmed,
        confirm(at_looks(best), at_looks(common), at_looks(same)),
        at_common,
        at_same,
        {one.variant: one.word for one, now in pairs if one.word != now.word},
    )


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


def loss_tables(found: SortedRuns) -> tuple[Losses, Losses, Losses]:
    """Return the final losses at the best rates, at the common rate, and with each arm against controls at its rate.

    In the last table the control arms have the common rate. The loss of an arm with another rate is moved by the
    difference of the control arms between the two rates, so that its difference to them is that at its rate.
    """
    runs = [*found.best, *found.common, *(run for group in found.controls.values() for run in group)]
    ends = {run.record.progress.tokens for run in runs if run.used}

    def losses_of(group: Sequence[Run]) -> Losses:
        return final_losses(
            [run for run in group if run.used and not (len(ends) > 1 and run.record.truncated)]
        )

    best, common = losses_of(found.best), losses_of(found.common)
    at_rate = {rate: losses_of(group) for rate, group in found.controls.items()}
    same = {
        name: losses
        if parse_arm(name).is_control or found.chosen.get(name) == found.control_rate
        else moved(losses, common, at_rate.get(found.chosen[name], {}))
        for name, losses in best.items()
    }
    return best, common, same


def moved(losses: Mapping[int, float], common: Losses, other: Losses) -> dict[int, float]:
    """Return the losses, moved by the difference of the control arms of two tables at the same seed."""
    found = {}
    for seed, loss in losses.items():
        (at_common,), (at_other,) = control_losses(common, [seed]), control_losses(other, [seed])
        if at_common and at_other:
            found[seed] = loss - mean(at_other) + mean(at_common)
    return found


def finished_seeds(
    found: SortedRuns, looks: Mapping[str, tuple[int, ...]], arms: Collection[str]
) -> dict[str, int]:
    """Return arm -> planned seeds at which every run that its verdict needs counts. arms: of the configuration."""
    common, at_best, at_common = found.control_rate, _counted(found.best), _counted(found.common)
    controls = [name for name in control_arms(found.chosen) if name in arms or not arms]

    def complete(name: str, seed: int) -> bool:
        rate = found.chosen.get(name, "")
        at_rate = at_common if rate == common else _counted(found.controls.get(rate, []))
        needed = [(name, seed) in at_best]
        if common:
            needed += [(name, seed) in at_common]
            needed += [(other, seed) in table for other in controls for table in (at_common, at_rate)]
        return all(needed)

    return {name: sum(complete(name, seed) for seed in range(counts[-1])) for name, counts in looks.items()}


def _counted(runs: Sequence[Run]) -> set[tuple[str, int | None]]:
    return {(run.variant, run.seed) for run in runs if run.used}


@dataclass
class ArmRates:
    """The tuning of one arm. chosen: its rate; "" before the choice. means: rate -> mean loss over the tuning seeds.

    next_rate: beyond the grid, if the chosen rate is at its edge; else "".
    """

    arm: str
    control: bool
    chosen: str
    means: dict[str, float | None]
    next_rate: str


@dataclass
class RateReport:
    """rates: the grid. control_rate: chosen for the control arms; "" before the choice, and without such arms.

    tuning: the tuning runs. others: judged runs that are not at the best rate of their arm. common, same, unconfirmed:
    see RateVerdicts.
    """

    rates: list[str]
    tuning_seeds: list[int]
    control_rate: str
    arms: list[ArmRates]
    tuning: list[RateRun]
    others: list[RateRun]
    common: list[Verdict]
    same: list[Verdict]
    unconfirmed: dict[str, str]

    @property
    def chosen(self) -> dict[str, str]:
        """Arm -> its rate, once it is chosen."""
        return {arm.arm: arm.chosen for arm in self.arms if arm.chosen}

    @property
    def pending(self) -> list[str]:
        """The names of the runs that the study still has to finish."""
        return [run.run for run in (*self.tuning, *self.others) if run.status in PENDING]


def rate_report(found: SortedRuns, verdicts: RateVerdicts) -> RateReport:
    """Summarize the tuning runs and the judged runs at other rates."""
    seeds = sorted({run.seed for run in found.tuning})
    typed = tuple(sorted({run.rate for run in found.tuning}, key=float))
    rates = found.rates or LearningRates(typed, max(1, len(seeds)))  # without a readable plan
    table = losses_of(found.tuning)
    arms = []
    for name in sorted(table.keys() | found.chosen.keys(), key=variant_order):
        chosen = found.chosen.get(name, "")
        means = mean_losses({name: table.get(name, {})}, rates)
        arms.append(ArmRates(name, parse_arm(name).is_control, chosen, means, edge(chosen, rates)))
    return RateReport(
        rates=list(rates.rates),
        tuning_seeds=seeds,
        control_rate=found.control_rate,
        arms=arms,
        tuning=found.tuning,
        others=found.others,
        common=verdicts.common,
        same=verdicts.same,
        unconfirmed=verdicts.unconfirmed,
    )
