"""The part of a report on learning rates, from the records alone. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ra.names import is_control_arm
from study.analysis.verdict import Verdict
from study.records.plan_file import LearningRates
from study.records.runs import PENDING, variant_order
from study.sweep.rates import edge, mean_losses
from study.sweep.tuning import RateRun, SortedRuns, losses_of
from study.sweep.verdicts import RateVerdicts


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
        arms.append(ArmRates(name, is_control_arm(name), chosen, means, edge(chosen, rates)))
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
