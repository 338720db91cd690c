"""The runs that a study needs, their recorded states, and the learning rates that they give. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from ra.arms import split_rate
from runtime import files, run_record
from study.records import plan_file
from study.records.plan_file import LearningRates, Plan
from study.records.present import read_record
from study.records.runs import EXPECTED, Expected, ExpectedRun, diverged, read_expected
from study.sweep.rates import FIRST_TUNING_SEED, judged_runs, tuning_runs
from study.sweep.tuning import choose_rates, chosen_text


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
        return split_rate(name)[0] if self.rates else name

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
            files.write_json(self.directory / EXPECTED, expected.to_json())
