"""What a study trains on what: the first line of its pages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2 import tokenizer
from ra.arms import controls_of, parse_arm
from runtime.dotconfig import ConfigError, parse_lines, read_symbols, read_text
from runtime.errors import UserError
from runtime.files import DamagedFileError
from runtime.run_record import RecordedTarget
from runtime.settings import Config
from study.analysis.verdict import at_rate_of_controls
from study.plan_file import Plan
from study.runs import Run
from study.study_settings import primary_arm

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
        default = f"{config.optimizer.learning_rate:g}"
        rates = dict.fromkeys(parse_arm(name).rate or default for name in (plan.variants if plan else ()))
        known = {
            "model": model.size,
            "layers": model.layers,
            "width": model.width,
            "heads": model.heads,
            "data": " ".join(data.files) or TEXTS.get(data.dataset, data.dataset),
            "learning_rate": " or ".join(rates) or default,
        }
        if config.grpo:
            known |= {"model": config.grpo.model, "layers": None, "data": config.grpo.train_file or "GSM8K"}
    return Experiment(
        **known,
        parameters=first.parameters if first else None,
        unit=tokenizer.find(first.fingerprint.tokenizer).unit if first else "token",
        validation_tokens=first.validation.tokens if first and first.task == "gpt2" else None,
        updates=tuple(sorted({row.iterations for row in plan.variants.values()} if plan else made)),
        batch=batch.effective if batch else None,
        length=batch.block_size if batch else None,
        dtype=target.dtype if target else None,
        device=target.device if target else None,
    )


Configuration = Mapping[str, str]  # symbol -> value


def finished_seeds(plan: Plan | None, runs: Sequence[Run]) -> dict[str, int]:
    """Return judged arm -> planned seeds at which its run and every run that its verdict needs count."""
    if plan is None or plan.design is None:
        return {}
    counted = {(run.variant, run.seed) for run in runs if run.used}
    missing = {(run.variant, run.seed) for run in runs if not run.used}
    names, design, found = {run.variant for run in runs}, plan.design, {}
    for name, looks in plan.looks.items():
        needed = controls_of(name, names)
        if design.choice:
            needed = [*needed, *design.controls, at_rate_of_controls(name, design)]
        seeds = range(plan.first_seed, plan.first_seed + looks[-1])
        found[name] = sum(
            (name, seed) in counted and not missing & {(other, seed) for other in needed} for seed in seeds
        )
    return found


def configuration(run_dir: Path) -> Configuration:
    """Return the saved settings of a run by symbol; empty where they cannot be read."""
    with contextlib.suppress(ConfigError, OSError):
        entries = parse_lines(read_text(run_dir / "config"), str(run_dir / "config"))
        return {name: entry.value for name, entry in entries.items()}
    return {}


def recorded_primary(settings: Configuration) -> str | None:
    """Return the arm of the primary comparison in the settings; None in unreadable settings."""
    if "PRIMARY" not in settings:
        return None
    return primary_arm(settings["PRIMARY"], settings.get("VARIANTS", "").split())


def planned_seeds(settings: Configuration) -> int:
    """Return CONFIG_SEEDS; 0 where it is unknown."""
    text = settings.get("SEEDS", "")
    return int(text) if text.isdecimal() else 0
