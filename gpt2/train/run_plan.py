"""The study's decisions for one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpt2.config.batch import BatchPlan


@dataclass(frozen=True)
class RunPlan:
    """What the study decided for this run before it started."""

    directory: Path
    run: str
    variant: str
    seed: int
    iterations: int
    batch: BatchPlan
    predicted_bytes: int | None = None
    hellaswag: Path | str = "not asked for"  # the items, or the reason why there are none
    warmup_iterations: int | None = None  # of "wsd"; None: a fraction of the iterations
    extended: float = 1.0  # times the budget of the configuration
    time_factor: float = 1.0  # times its time limit: of a count that was taken over from faster variants
