"""Verdicts on arms at their tuned learning rates. Needs no torch.

The choice of a rate from a few tuning runs is partly chance: of two control arms, one can get a worse rate than the
other, and a test at the chosen rates then finds a real difference that is not an effect of the arm. So "better" at the
chosen rates must hold against the control arms at the arm's rate, too, and "worse" at the rate of the control arms. An
arm that is in truth a control arm has no effect in these two tests whatever the rates, so each direction keeps 2.5 %.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ra.names import is_control_arm
from referee.verdict.statistics import mean
from study.analysis.equivalence import Losses, control_losses
from study.analysis.verdict import BETTER, CANNOT_TELL, WORSE, Verdict, earlier_verdicts, judge
from study.records.design import Design
from study.records.runs import Run, final_losses
from study.sweep.tuning import SortedRuns


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
        if is_control_arm(name) or found.chosen.get(name) == found.control_rate
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
    controls = [name for name in found.chosen if is_control_arm(name) and (name in arms or not arms)]

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
