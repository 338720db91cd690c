"""What the tools answer, as the corpus judges it: the only file of the corpus that knows their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from referee.numerics import repeat_step
from referee.numerics.compare.compare_records import compare_records
from referee.numerics.monitor.invariants import invariants
from referee.numerics.oracle.recorded_operations import operations
from referee.numerics.rounding.operation_checks import Oracle


@dataclass(frozen=True)
class Answer:
    """The answer of a comparison."""

    verdict: str  # equal, rounding or diverges; with ", incomplete"
    module: str = ""  # dotted path of the module that the first row is in
    evidence: str = ""
    direction: str = ""
    call: str = (
        ""  # name of the first row, or of the first call with an unequal result, and its step and rank
    )


def compared(
    target: Path, golden: Path, names: Mapping[str, Any] | None = None, ranks: str = "equal"
) -> Answer:
    """Compare two records. names, ranks: as of compare_records."""
    found = compare_records(target, golden, names=names, ranks=ranks)
    if found.first is None:
        return Answer(found.verdict_text, call=found.first_unequal or "")
    first = found.first
    return Answer(found.verdict, first.module, first.evidence, first.direction, f"{first.call}, {first.step}")


def wrong_operations(record: Path, device: Callable[[], AbstractContextManager[Any]]) -> set[tuple[str, str]]:
    """Check a record on a device. Returns label and direction of the operations that are wrong."""
    oracle = Oracle(torch.device("cpu"), around=device)
    for operation in operations(record):
        oracle.check(operation)
    return {(check.label, check.direction) for check in oracle.checks if check.wrong}


def monitored(folder: Path) -> list[str]:
    """Return the findings of a monitored run, the first one first: kind and name of the tensor, and the step."""
    return [f"{row.call}, {row.place.partition(',')[0]}" for row in invariants(folder)]


def repeated(step: Callable[[], Tensor], state: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Repeat a step. Returns the cause, the operation and its module; None where the step is reproducible."""
    causes = repeat_step(step, state, times=3, threads=1).causes
    if not causes:
        return None
    first = causes[0]
    assert first.operation is not None
    return first.name, first.operation.name, first.operation.place
