"""Sort the runs of a study that tunes learning rates: tuning runs, and judged runs by the arm without its rate.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ra.arms import split_rate
from ra.names import is_control_arm
from runtime import run_record
from runtime.errors import UserError
from study.records.plan_file import LearningRates, Plan
from study.records.runs import DIVERGED, Run, read_runs
from study.sweep.rates import FIRST_TUNING_SEED, choose, control_rate, tuning_runs

NO_LOSS = (
    "no finite loss",
    "not admitted",
    DIVERGED,
)  # causes for which a run that ended has no loss that counts


@dataclass(frozen=True)
class RateRun:
    """A run at one rate. loss: final, in nats; None: why_not names the reason. final: the run cannot get another loss.

    A diverged run is final: it fails again in every repetition.
    """

    run: str
    arm: str
    rate: str
    seed: int
    status: str
    loss: float | None
    why_not: str
    final: bool


@dataclass(frozen=True)
class SortedRuns:
    """The runs of a study that tunes learning rates. A judged run has the name of its arm without the rate as variant.

    rates: of the plan; None without a readable plan. best: every arm at its chosen rate. common: every arm at the rate
    of the control arms. controls: rate -> the control arms at it, for other rates. others: judged runs not in best.
    """

    rates: LearningRates | None
    tuning: list[RateRun]
    best: list[Run]
    common: list[Run]
    controls: dict[str, list[Run]]
    others: list[RateRun]

    @property
    def chosen(self) -> Mapping[str, str]:
        """Arm -> its rate."""
        return self.rates.chosen if self.rates else {}

    @property
    def control_rate(self) -> str:
        """The rate of the control arms; "" without one."""
        return control_rate(self.rates) if self.rates else ""


def is_tuning(run: Run) -> bool:
    """Return whether the run has a tuning seed."""
    return run.seed is not None and run.seed >= FIRST_TUNING_SEED


def sort_runs(plan: Plan | None, runs: Sequence[Run]) -> SortedRuns | None:
    """Sort the runs; None in a study at one rate. Without a readable plan no run is judged."""
    rates = plan.learning_rates if plan else None
    if rates is None and not any(map(is_tuning, runs)):
        return None
    found = SortedRuns(rates, list(map(_rate_run, filter(is_tuning, runs))), [], [], {}, [])
    for run in (run for run in runs if not is_tuning(run)):
        arm, rate = split_rate(run.variant)
        judged = replace(run, variant=arm)
        if run.seed is None or found.chosen.get(arm) == rate:  # a record without a seed cannot be read
            found.best.append(judged)
        else:
            found.others.append(_rate_run(run))
        if arm in found.chosen and rate == found.control_rate:
            found.common.append(judged)
        elif arm in found.chosen and is_control_arm(arm):
            found.controls.setdefault(rate, []).append(judged)
    return found


def judged_at_best(plan: Plan | None, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that the main part of a report shows: all, or in a study with rates each arm's at its rate."""
    found = sort_runs(plan, runs)
    return found.best if found else list(runs)


def _rate_run(run: Run) -> RateRun:
    arm, rate = split_rate(run.variant)
    loss = run.record.validation.loss if run.used and not run.record.truncated else None
    why_not = run.why_not or ("" if loss is not None else "a time limit cut it")
    final = run.used or run.cause in NO_LOSS
    assert run.seed is not None
    return RateRun(run.name, arm, rate, run.seed, run.status, loss, why_not, final)


def losses_of(runs: Sequence[RateRun]) -> dict[str, dict[str, list[float | None]]]:
    """Return arm -> rate -> loss of each run."""
    table: dict[str, dict[str, list[float | None]]] = {}
    for run in runs:
        table.setdefault(run.arm, {}).setdefault(run.rate, []).append(run.loss)
    return table


def choose_rates(study_dir: Path, plan: Plan, variants: Sequence[str]) -> Plan:
    """Return the plan with a rate for each arm, from the finished tuning runs.

    UserError for a tuning run that does not count, and for judged runs that had other rates.
    """
    found = sort_runs(plan, runs := read_runs(study_dir))
    if found is None or found.rates is None:
        return plan
    by_name = {run.run: run for run in found.tuning}
    tuning = []
    for variant, seed in tuning_runs(variants, found.rates):
        name = run_record.run_name(variant, seed)
        run = by_name.get(name)
        if run is None or not run.final:
            raise UserError(
                f"no learning rate is chosen, because the tuning run {name} does not count: "
                f"{run.why_not if run else 'its record cannot be read'}"
            )
        tuning.append(run)
    rates = choose(losses_of(tuning), found.rates)
    if not found.rates.chosen:
        _refuse_other_rates(runs, rates)
    return replace(plan, learning_rates=rates)


def _refuse_other_rates(runs: Sequence[Run], rates: LearningRates) -> None:
    """UserError if judged runs from before the loss of plan.json show that another rate was chosen."""
    judged: dict[str, set[str]] = {}
    for run in runs:
        if run.status != "missing" and run.seed is not None and not is_tuning(run):
            arm, rate = split_rate(run.variant)
            judged.setdefault(arm, set()).add(rate)
    for arm, seen in judged.items():
        rate = rates.chosen.get(arm, "")
        if rate and (rate not in seen if is_control_arm(arm) else seen - {rate, control_rate(rates)}):
            raise UserError(
                f"plan.json lost the chosen learning rates; the tuning runs now give {rate} for {arm}, and its judged "
                f"runs have {', '.join(sorted(seen))}; fix: restore plan.json, or set another CONFIG_STUDY_NAME"
            )


def chosen_text(rates: LearningRates) -> str:
    """Say which rates were chosen, in one line."""
    common = control_rate(rates)
    controls = [name for name in rates.chosen if is_control_arm(name)]
    parts = [f"{', '.join(controls)} {common}"] if controls else []
    parts += [f"{name} {rate}" for name, rate in rates.chosen.items() if name not in controls]
    seeds = ", ".join(str(FIRST_TUNING_SEED + number) for number in range(rates.tuning_seeds))
    plural = "s" if rates.tuning_seeds > 1 else ""
    return f"learning rates chosen on tuning seed{plural} {seeds}: {'; '.join(parts)}"
