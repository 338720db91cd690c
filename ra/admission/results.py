"""The results of an examination. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ra.admission.violation import Violation
from runtime.typed_json import JsonObject, Missing

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


@dataclass(frozen=True)
class Outcome(JsonObject):
    """The result of one check: PASSED, FAILED, or why it was not made."""

    check: str
    result: str
    seconds: float


@dataclass(frozen=True)
class Cost(JsonObject):
    """Cost of a model. flops_per_token: matrix FLOPs of a training token. attention_calls: fused, of a layer.

    memory_bytes: predicted peak of a training step on one sequence in float32 on a CPU. None: it cannot be counted.
    """

    parameters: int
    flops_per_token: float | None
    attention_calls: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Costs(JsonObject):
    """The variant beside the baseline. width_...: of the variant, where it costs what the baseline costs."""

    variant: Cost
    baseline: Cost
    width_equal_parameters: int | None
    width_equal_flops: int | None


@dataclass(frozen=True)
class Examination(JsonObject):
    """All results of a variant."""

    variant: str
    outcomes: tuple[Outcome, ...]
    violations: tuple[Violation, ...]
    costs: Missing[Costs] = None

    @property
    def complete(self) -> bool:
        """Whether every check came to a result: no crash and no time limit."""
        return len(self.outcomes) == len(CHECKS)

    @property
    def admitted(self) -> bool:
        return self.complete and not self.violations
