"""The part of a report on learning rates, from the records alone. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ra.arms import control_arms, parse_arm
from referee.verdict.statistics import mean
from runtime import records, run_record
from runtime.errors import UserError
from study import plan_file
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
from study.plan_file import LearningRates, Plan
from study.runs import (
    DIVERGED,
    EXPECTED,
    PENDING,
    Expected,
    ExpectedRun,
    Run,
    diverged,
    final_losses,
    read_expected,
    read_record,
    read_runs,
    variant_order,
)
from study.study_settings import (
    FIRST_TUNING_SEED,
    choose,
    control_rate,
    edge,
    judged_runs,
    mean_losses,
    tuning_runs,
)

# Sort the runs of a study that tunes learning rates: tuning runs, and judged runs by the arm without its rate.
#
# Needs no torch.


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
        seeds: range,
        rates: LearningRates | None,
    ) -> None:
        self.directory, self.variants, self.seeds = directory, variants, seeds
        self.rates = rates

    def all(self) -> list[tuple[str, int]]:
        """Return every (variant, seed), ordered by seed, so that each finished seed compares all variants.

        With learning rates: the tuning runs, then the judged runs of the arms whose rate is chosen.
        """
        if self.rates:
            return tuning_runs(self.variants, self.rates) + judged_runs(
                self.variants, len(self.seeds), self.rates
            )
        return [(name, seed) for seed in self.seeds for name in self.variants]

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
        expected = Expected(self.variants, len(self.seeds), runs, self.seeds.start)
        if read_expected(self.directory) != expected:
            records.write(self.directory / EXPECTED, expected, self.directory.name)


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


def judge_rates(
    found: SortedRuns,
    primary: str,
    looks: Mapping[str, tuple[int, ...]],
    finished: Mapping[str, int],
    margin: float,
) -> RateVerdicts:
    """Judge the arms at their rates. finished: see `finished_at_rates`."""
    best, common, same = loss_tables(found)

    def at_looks(table: Losses) -> list[Verdict]:
        return earlier_verdicts(table, margin, primary, looks)

    at_best, at_common, at_same = (
        judge(table, margin, primary, looks, finished) for table in (best, common, same)
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


def finished_at_rates(
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
