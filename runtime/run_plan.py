"""The plan of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.batch_plan import BatchPlan


@dataclass(frozen=True)
class Start:
    """The shorter run that a run continues, from the state in which its decay began."""

    directory: Path  # of that run
    iterations: int  # that it was planned for
    schedule: str  # of its fingerprint


@dataclass(frozen=True)
class RunPlan:
    """Parameters of one run, set by the study before the run starts."""

    directory: Path
    run: str
    variant: str
    seed: int
    iterations: int
    batch: BatchPlan
    predicted_bytes: int | None = None
    hellaswag: Path | str = "not asked for"  # file of the items, or the reason why there are none
    warmup_iterations: int | None = None  # of "wsd"; None: a fraction of the iterations
    continues: Start | None = None  # None: from the first iteration
