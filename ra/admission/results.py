"""The results of an examination. Needs no torch."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from ra import arms
from runtime.errors import short_path, source_line
from runtime.records import Record

OURS = ("ra.reciprocal_attention", "ra.published.", "ra.admission.")


class Violation(Record, frozen=True):
    """One fault of a variant. layer, position: None where the fault has none.

    size: of the effect, relative to the largest output. message: the fact. fix: one action.
    """

    variant: str
    check: str
    message: str
    fix: str
    layer: int | None = None
    position: int | None = None
    size: float | None = None
    file: str | None = None
    line: int | None = None

    @property
    def where(self) -> str:
        """The source as file:line; "" where it is unknown."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        """The whole violation in one line."""
        layer = "" if self.layer is None else f"layer {self.layer}: "
        where = f" ({self.where})" if self.where else ""
        return f"{self.variant} fails the check {self.check}: {layer}{self.message}{where}; fix: {self.fix}"


def error_line(error: BaseException) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame in ra/custom, else in ra/ outside of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    for folder in (arms.CUSTOM_FOLDER, Path(__file__).parents[1]):
        found = [f for f in frames if f.filename.startswith(f"{folder}/") and not f.filename.startswith(ours)]
        if found:
            return short_path(found[-1].filename), found[-1].lineno or 0, found[-1].name
    return None


def describe(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def violation(
    message: str, fix: str, module: Any = None, error: BaseException | None = None, **details: Any
) -> Violation:
    """A violation with its source: the line of an error, else the method of `module` that the variant defines.

    ra.admission.examine adds the variant and the check.
    """
    raised = error_line(error) if error else None
    file, line = raised[:2] if raised else source_line(module) or _only_line(module) or (None, None)
    return Violation("", "", message, fix, file=file, line=line, **details)


def _only_line(module: Any) -> tuple[str, int] | None:
    """The line of the one part of a block that the user wrote; None where there are none or several."""
    parts = module.modules() if hasattr(module, "modules") else ()
    lines = {source_line(part) for part in parts if not type(part).__module__.startswith(OURS)} - {None}
    return lines.pop() if len(lines) == 1 else None


CHECKS = {
    "inplace": "the input is unchanged after a call",
    "shape": "(B, T, C) in and out, one dtype, every length",
    "deterministic": "equal instances from one seed, equal outputs of two calls, nothing kept between calls",
    "state": "a call changes no parameter and no buffer",
    "causal": "no output depends on a later input",
    "batch": "no output depends on another sequence of the batch",
    "mode": "training and evaluation compute one function",
    "length": "the outputs of a shorter input are the first ones of a longer input",
    "finite": "finite outputs and gradients for small, large, equal and zero inputs",
    "gradients": "every parameter has a gradient, and it is right",
    "shared": "no two layers share a parameter",
    "step": "a training step of the optimizer runs, and its loss is finite",
    "outside": "a call changes nothing of torch, numpy, this project or the process",
    "process": "two processes with one seed build the same attention",
}
OUTSIDE, PROCESS = "outside", "process"
PASSED, FAILED = "passed", "failed"


class Outcome(Record, frozen=True):
    """The result of one check: PASSED, FAILED, or why it was not made."""

    check: str
    result: str
    seconds: float


class Cost(Record, frozen=True):
    """Cost of a model. flops_per_token: matrix FLOPs of a training token. attention_calls: fused, of a layer.

    memory_bytes: predicted peak of a training step on one sequence in float32 on a CPU. None: it cannot be counted.
    """

    parameters: int
    flops_per_token: float | None
    attention_calls: float | None
    memory_bytes: int | None


class Costs(Record, frozen=True):
    """The variant beside the baseline. width_...: of the variant, where it costs what the baseline costs."""

    variant: Cost
    baseline: Cost
    width_equal_parameters: int | None
    width_equal_flops: int | None


class Examination(Record, frozen=True):
    """All results of a variant."""

    variant: str
    outcomes: tuple[Outcome, ...]
    violations: tuple[Violation, ...]
    costs: Costs | None = None

    @property
    def complete(self) -> bool:
        """Whether every check came to a result: no crash and no time limit."""
        return len(self.outcomes) == len(CHECKS)

    @property
    def admitted(self) -> bool:
        return self.complete and not self.violations
