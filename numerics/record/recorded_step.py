"""The rows of a step while it is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class RecordedStep:
    """The rows of the step that is being recorded."""

    data: dict[str, Any] = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # file name -> value
    calls: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    models: list[tuple[str, nn.Module]] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)  # of the models, by id
    roots: set[str] = field(default_factory=set)  # calls of the models that start() received
    uncalled: set[str] = field(
        default_factory=set
    )  # modules whose parameters are recorded with an outer module


@dataclass(frozen=True)
class OpenCall:
    """A call that runs. name: empty during a recomputation. begin: autograd's number before it."""

    name: str
    label: str
    inputs: tuple[Any, Any]
    begin: int
    recorded: bool


def backward_name(name: str) -> str:
    """Return the name of the backward of a call."""
    head, _, tail = name.rpartition("forward")
    return f"{head}backward{tail}"
