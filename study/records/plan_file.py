"""plan.json: the counts, the batch and the step times of a study, as frozen dataclasses. Needs no torch.

Plans of older versions are readable: `equal_tokens` of their budget is the negation of `equal_time`, and they have
neither `step_time_ratios` nor `hard_limit_seconds`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2.config.batch import BatchPlan
from gpt2.system import files
from gpt2.system.errors import UserError

FILE = "plan.json"


class PlanFileError(UserError, RuntimeError):
    """plan.json is not a plan."""


@dataclass(frozen=True)
class PlanBudget:
    """Limits of one run; 0 means no limit. equal_time: counts follow the ratio of step times."""

    max_time_seconds: float
    max_tokens: float
    max_iterations: float
    hard_limit_seconds: float = 0
    equal_time: bool = False


@dataclass(frozen=True)
class CostClass:
    """Variants whose steps cost the same. samples: seconds of each timed step. peak_bytes: None where not measured."""

    seconds_per_iteration: float
    samples: tuple[float, ...] = ()
    peak_bytes: int | None = None


@dataclass(frozen=True)
class StepTimeRatio:
    """Step time of a cost class over that of class `to`, with its 95 % interval (None where it is unknown)."""

    to: str
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PlanRow:
    """The runs of one variant. warmup_iterations: of "wsd" alone. first_iterations: before any extension."""

    cost_class: str
    iterations: int
    tokens: int
    predicted_bytes: int | None = None
    warmup_iterations: int | None = None
    first_iterations: int | None = None

    def to_json(self) -> dict[str, Any]:
        optional = {"warmup_iterations": self.warmup_iterations, "first_iterations": self.first_iterations}
        return {
            "class": self.cost_class,
            "iterations": self.iterations,
            "tokens": self.tokens,
            "predicted_bytes": self.predicted_bytes,
        } | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True)
class Plan:
    """The content of plan.json. extended: the budget over the first budget, None before any extension.

    interval_tokens, grid_tokens: training tokens between evaluations, and at each evaluation.
    """

    batch: BatchPlan
    budget: PlanBudget
    variants: Mapping[str, PlanRow]
    classes: Mapping[str, CostClass] = field(default_factory=dict)
    step_time_ratios: Mapping[str, StepTimeRatio] = field(default_factory=dict)
    interval_tokens: int = 0
    grid_tokens: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    extended: float | None = None
    study: str = ""
    created: str = ""
    config_sha256: str = ""
    target: Mapping[str, Any] = field(default_factory=dict)
    equivalence_margin: float = math.log(1.01)  # nats

    def planned_seconds(self, variant: str) -> float | None:
        """Training seconds of one run of the variant; None where no step of its class was timed."""
        row = self.variants[variant]
        timed = self.classes.get(row.cost_class)
        return row.iterations * timed.seconds_per_iteration if timed else None

    def to_json(self) -> dict[str, Any]:
        extended = {} if self.extended is None else {"extended": self.extended}
        return {
            "schema": 1,
            "study": self.study,
            "created": self.created,
            "config_sha256": self.config_sha256,
            "target": dict(self.target),
            "batch": dataclasses.asdict(self.batch),
            "budget": dataclasses.asdict(self.budget),
            "classes": {name: dataclasses.asdict(timed) for name, timed in self.classes.items()},
            "step_time_ratios": {
                name: dataclasses.asdict(ratio) for name, ratio in self.step_time_ratios.items()
            },
            "variants": {name: row.to_json() for name, row in self.variants.items()},
            "evaluation": {"interval_tokens": self.interval_tokens, "grid_tokens": list(self.grid_tokens)},
            "notes": list(self.notes),
            "equivalence_margin": self.equivalence_margin,
        } | extended


def read(study_dir: Path, name: str = FILE) -> Plan | None:
    """Read the study's plan, or a saved one by the name of its file.

    None where there is none; PlanFileError where the file is not a plan.
    """
    path = study_dir / name
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else f"{error}"
        raise PlanFileError(
            f"{path} cannot be read ({' '.join(reason.split())}); fix: delete it and run `make`, which plans the "
            "study again and keeps the counts of recorded runs"
        ) from error


def write(study_dir: Path, plan: Plan) -> Plan:
    """Write plan.json atomically."""
    files.write_json(study_dir / FILE, plan.to_json())
    return plan


def from_json(content: dict[str, Any]) -> Plan:
    """The plan in the content of plan.json; KeyError, TypeError or ValueError where it is none."""
    variants = {str(name): _row(row) for name, row in content["variants"].items()}
    evaluation = content.get("evaluation") or {}
    extended = content.get("extended")
    return Plan(
        batch=BatchPlan(**{name: int(value) for name, value in content["batch"].items()}),
        budget=_budget(content["budget"], len({row.iterations for row in variants.values()}) > 1),
        variants=variants,
        classes={str(name): _cost_class(row) for name, row in content["classes"].items()},
        step_time_ratios={
            str(name): StepTimeRatio(
                str(row["to"]), float(row["ratio"]), _optional(row.get("low")), _optional(row.get("high"))
            )
            for name, row in (content.get("step_time_ratios") or {}).items()
        },
        interval_tokens=int(evaluation.get("interval_tokens", 0)),
        grid_tokens=tuple(int(tokens) for tokens in evaluation.get("grid_tokens", ())),
        notes=tuple(str(note) for note in content["notes"]),
        extended=_optional(extended),
        study=str(content.get("study", "")),
        created=str(content.get("created", "")),
        config_sha256=str(content.get("config_sha256", "")),
        target=dict(content.get("target") or {}),
        equivalence_margin=float(content.get("equivalence_margin", math.log(1.01))),
    )


def _budget(content: dict[str, Any], counts_differ: bool) -> PlanBudget:
    """counts_differ: what says "equal time" in a plan from before the key."""
    return PlanBudget(
        max_time_seconds=_number(content["max_time_seconds"]),
        max_tokens=_number(content["max_tokens"]),
        max_iterations=_number(content["max_iterations"]),
        hard_limit_seconds=_number(content.get("hard_limit_seconds", 0)),
        equal_time=bool(content.get("equal_time", counts_differ and not content.get("equal_tokens", False))),
    )


def _row(content: dict[str, Any]) -> PlanRow:
    optional = {
        name: None if content.get(name) is None else int(content[name])
        for name in ("predicted_bytes", "warmup_iterations", "first_iterations")
    }
    row = PlanRow(str(content["class"]), int(content["iterations"]), int(content["tokens"]), **optional)
    if row.iterations < 1:
        raise ValueError(f"{row.iterations} iterations")
    return row


def _cost_class(content: dict[str, Any]) -> CostClass:
    peak = content.get("peak_bytes")
    return CostClass(
        float(content["seconds_per_iteration"]),
        tuple(float(sample) for sample in content.get("samples", ())),
        None if peak is None else int(peak),
    )


def _number(value: Any) -> float:
    """A limit: whole numbers stay whole."""
    number = float(value)
    return int(number) if number.is_integer() else number


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)
