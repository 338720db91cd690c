"""The plan of one run: runs/NAME/plan.json, all that its worker reads besides checkpoints and ra/custom."""

from __future__ import annotations

from pathlib import Path

from runtime import records
from runtime.batch_plan import BatchPlan
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.records import Count, Positive, Record, Task, Text
from runtime.run_record import RecordedTarget, run_name
from runtime.settings import Config

FILE = "plan.json"


class Start(Record, frozen=True):
    """The shorter run that a run continues, from the state in which its decay began."""

    directory: Path  # of that run
    iterations: Positive  # that it was planned for
    schedule: Text  # of its fingerprint


class RunPlan(Record, kw_only=True, frozen=True):
    """The content of plan.json of a run, written by the study before the run starts."""

    task: Task = "gpt2"
    study: Text
    arm: Text  # its name, which ra.arms parses
    seed: Count
    settings: Config  # of the study; the arm may change the width and the optimizer
    batch: BatchPlan  # a worker splits it among its ranks
    iterations: Positive
    warmup_iterations: Count | None = None  # of "wsd"; None: a fraction of the iterations
    predicted_bytes: Count | None = None
    target: RecordedTarget | None = None  # the device of the study's plan
    hellaswag: Path | None = None  # the file of the items
    hellaswag_absent: str = "not asked for"  # the reason where there is no file
    start: Start | None = None  # None: from the first iteration

    @property
    def run(self) -> str:
        """Return the name of the run and of its folder."""
        return run_name(self.arm, self.seed)

    @property
    def owner(self) -> str:
        """Return what the files of the run say that they belong to."""
        return f"{self.study}/{self.run}"


def write(run_dir: Path, plan: RunPlan) -> None:
    """Write plan.json. One with this content stays as it is: the checksums of a run that just ended hold it."""
    path = run_dir / FILE
    try:
        if load(path) == plan:
            return
    except UserError:  # missing or damaged
        pass
    records.write(path, plan, plan.owner)


def load(path: Path) -> RunPlan:
    """Read the plan of a run. UserError where it is missing, or not as it was written."""
    try:
        return records.read(RunPlan, path)
    except (FileNotFoundError, DamagedFileError) as error:
        raise UserError(f"{error}; fix: run `make`, which writes the plan of every run") from None
