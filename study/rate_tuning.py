"""Sort the runs of a study that tunes learning rates: tuning runs, and judged runs by the arm without its rate.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ra.arms import control_arms, parse_arm
from runtime import records, run_record
from runtime.errors import UserError
from study import plan_file
from study.plan_file import LearningRates, Plan
from study.runs import (
    DIVERGED,
    EXPECTED,
    Expected,
    ExpectedRun,
    Run,
    diverged,
    read_expected,
    read_record,
    read_runs,
)
from study.study_settings import FIRST_TUNING_SEED, choose, control_rate, judged_runs, tuning_runs

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
        parsed = parse_arm(run.variant)
        arm, rate = parsed.without_rate.name, parsed.rate
        judged = replace(run, variant=arm)
        if run.seed is None or found.chosen.get(arm) == rate:  # a record without a seed cannot be read
            found.best.append(judged)
        else:
            found.others.append(_rate_run(run))
        if arm in found.chosen and rate == found.control_rate:
            found.common.append(judged)
        elif arm in found.chosen and parse_arm(arm).is_control:
            found.controls.setdefault(rate, []).append(judged)
    return found


def judged_at_best(plan: Plan | None, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that the main part of a report shows: all, or in a study with rates each arm's at its rate."""
    found = sort_runs(plan, runs)
    return found.best if found else list(runs)


def _rate_run(run: Run) -> RateRun:
    arm = parse_arm(run.variant)
    loss = run.record.validation.loss if run.used and not run.record.truncated else None
    why_not = run.why_not or ("" if loss is not None else "a time limit cut it")
    final = run.used or run.cause in NO_LOSS
    assert run.seed is not None
    return RateRun(run.name, arm.without_rate.name, arm.rate, run.seed, run.status, loss, why_not, final)


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
    return plan.replace(learning_rates=rates)


def _refuse_other_rates(runs: Sequence[Run], rates: LearningRates) -> None:
    """UserError if judged runs from before the loss of plan.json show that another rate was chosen."""
    judged: dict[str, set[str]] = {}
    for run in runs:
        if run.status != "missing" and run.seed is not None and not is_tuning(run):
            parsed = parse_arm(run.variant)
            judged.setdefault(parsed.without_rate.name, set()).add(parsed.rate)
    for arm, seen in judged.items():
        rate = rates.chosen.get(arm, "")
        if rate and (rate not in seen if parse_arm(arm).is_control else seen - {rate, control_rate(rates)}):
            raise UserError(
                f"plan.json lost the chosen learning rates; the tuning runs now give {rate} for {arm}, and its judged "
                f"runs have {', '.join(sorted(seen))}; fix: restore plan.json, or set another CONFIG_STUDY_NAME"
            )


def chosen_text(rates: LearningRates) -> str:
    """Say which rates were chosen, in one line."""
    common = control_rate(rates)
    controls = control_arms(rates.chosen)
    parts = [f"{', '.join(controls)} {common}"] if controls else []
    parts += [f"{name} {rate}" for name, rate in rates.chosen.items() if name not in controls]
    seeds = ", ".join(str(FIRST_TUNING_SEED + number) for number in range(rates.tuning_seeds))
    plural = "s" if rates.tuning_seeds > 1 else ""
    return f"learning rates chosen on tuning seed{plural} {seeds}: {'; '.join(parts)}"


class RunList:
    """The runs of one configuration. rates: with the choice, from the time when plan.json has it; None: one rate."""

    def __init__(
        self,
        directory: Path,
        variants: tuple[str, ...],
        seeds: int,
        rates: LearningRates | None,
    ) -> None:
        self.directory, self.variants, self.seeds = directory, variants, seeds
        self.rates = rates

    def all(self) -> list[tuple[str, int]]:
        """Return every (variant, seed), ordered by seed, so that each finished seed compares all variants.

        With learning rates: the tuning runs, then the judged runs of the arms whose rate is chosen.
        """
        if self.rates:
            return tuning_runs(self.variants, self.rates) + judged_runs(self.variants, self.seeds, self.rates)
        return [(name, seed) for seed in range(self.seeds) for name in self.variants]

    def folder(self, name: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.directory / "runs" / run_record.run_name(name, seed)

    def status(self, name: str, seed: int) -> str:
        """Return the recorded status, or "missing"."""
        record = read_record(self.folder(name, seed))
        return record.status if record else "missing"

    def is_done(self, name: str, seed: int) -> bool:
        """Return whether the run is finished. A tuning run that diverged is done, too: it has no loss."""
        record = read_record(self.folder(name, seed))
        if record is None:
            return False
        tuning = seed >= FIRST_TUNING_SEED
        return record.status == "finished" or (tuning and diverged(record.status, record.error))

    def pending(self) -> list[tuple[str, int]]:
        """Return the runs that `make` still has to execute."""
        return [run for run in self.all() if not self.is_done(*run)]

    def arm(self, name: str) -> str:
        """Return the arm of a run in CONFIG_VARIANTS."""
        return parse_arm(name).without_rate.name if self.rates else name

    def unchosen(self) -> bool:
        """Return whether an arm has no chosen learning rate, in a study that tunes them."""
        return self.rates is not None and not set(self.variants) <= set(self.rates.chosen)

    def read_choice(self) -> None:
        """Read the chosen learning rates, if plan.json has them."""
        plan = plan_file.read_valid(self.directory) if self.rates else None
        if plan and plan.learning_rates:
            self.rates = plan.learning_rates

    def choose(self, plan: Plan) -> Plan:
        """Return the plan with the learning rates that the tuning runs give, once they are done."""
        if self.unchosen() and not [seed for _, seed in self.pending() if seed >= FIRST_TUNING_SEED]:
            plan = plan_file.write(self.directory, choose_rates(self.directory, plan, self.variants))
            self.read_choice()
            self.write_expected()
            if self.rates:
                print(chosen_text(self.rates))
        return plan

    def write_expected(self) -> None:
        """Record the configured runs for the report."""
        runs = tuple(ExpectedRun(*run) for run in self.all()) if self.rates else None
        expected = Expected(self.variants, self.seeds, runs)
        if read_expected(self.directory) != expected:
            records.write(self.directory / EXPECTED, expected, self.directory.name)
