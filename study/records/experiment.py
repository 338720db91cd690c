"""What a study trains on what: the first line of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2 import tokenizer
from runtime.dotconfig import read_symbols
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.run_record import RecordedTarget
from runtime.settings import Config
from study.records.plan_file import Plan
from study.records.runs import Run

TEXTS = {"embedded": "source of Python's standard library"}  # other data sets are known by their names


@dataclass(frozen=True)
class Experiment:
    """None: neither the configuration of the study nor its plan nor a record has the entry."""

    model: str | None = None  # its name
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    parameters: int | None = None  # of the first counted run
    data: str | None = None
    unit: str | None = None  # of a token
    validation_tokens: int | None = None
    updates: tuple[int, ...] = ()  # of a run; several numbers where the variants differ
    batch: int | None = None  # sequences of an update
    length: int | None = None  # tokens of a sequence
    learning_rate: str | None = None
    dtype: str | None = None
    device: str | None = None

    @property
    def text(self) -> str:
        """One sentence for each part that is known."""
        size = [f"{self.layers} layers, width {self.width}, {self.heads} heads"] if self.layers else []
        size += [f"{self.parameters:,} parameters"] if self.parameters else []
        counts = " or ".join(f"{count:,}" for count in self.updates)
        amount = (
            f"{counts} updates x {self.batch} sequences x {self.length:,} {self.unit}s" if self.length else ""
        )
        if len(self.updates) == 1 and self.batch and self.length:
            amount += f" = {self.updates[0] * self.batch * self.length:,} {self.unit}s"
        held_out = f"; validation on {self.validation_tokens:,}" if self.validation_tokens else ""
        parts = {
            "Model": ", ".join(filter(None, [self.model, *size])),
            "Data": self.data,
            "A run": amount + held_out if self.updates else "",
            "Learning rate": self.learning_rate,
            "Computed in": f"{self.dtype} on {self.device}" if self.device else "",
        }
        return " ".join(f"{name}: {part}." for name, part in parts.items() if part)


def read_experiment(study_dir: Path, plan: Plan | None, used: Sequence[Run]) -> Experiment:
    """Read what the study trains on what from its configuration, its plan and the counted runs."""
    first = used[0].record if used else None
    made = {run.record.progress.iterations for run in used}
    batch = plan.batch if plan else first.batch if first else None
    target: RecordedTarget | None = first.target if first else plan.target if plan else None
    known: dict[str, Any] = {}
    try:
        config = Config.from_symbols(read_symbols(study_dir / "config"))
    except (UserError, DamagedFileError, OSError):  # of another version, or none
        pass
    else:
        model, data = config.model, config.data
        rates = plan.learning_rates.rates if plan and plan.learning_rates else ()
        known = {
            "model": model.size,
            "layers": model.layers,
            "width": model.width,
            "heads": model.heads,
            "data": " ".join(data.files) or TEXTS.get(data.dataset, data.dataset),
            "learning_rate": " or ".join(rates) or f"{config.optimizer.learning_rate:g}",
        }
    return Experiment(
        **known,
        parameters=first.parameters if first else None,
        unit=tokenizer.find(first.fingerprint.tokenizer).unit if first else "token",
        validation_tokens=first.validation.tokens if first else None,
        updates=tuple(sorted({row.iterations for row in plan.variants.values()} if plan else made)),
        batch=batch.effective if batch else None,
        length=batch.block_size if batch else None,
        dtype=target.dtype if target else None,
        device=target.device if target else None,
    )
