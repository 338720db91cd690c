"""The rows of a step while it is recorded."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class Makers:
    """The recorded call that last returned each tensor. A view has the maker of the memory that it shows."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[StorageWeakRef, str]] = {}

    def add(self, tensor: Tensor, name: str) -> None:
        # sparse and wrapped tensors have no memory
        with contextlib.suppress(RuntimeError, NotImplementedError):
            reference = StorageWeakRef(tensor.untyped_storage())
            self._calls[reference.cdata] = reference, name

    def of(self, tensor: Tensor) -> str:
        """Return the name of the call; "" for a tensor that no recorded call returned."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            reference, name = self._calls.get(tensor.untyped_storage()._cdata, (None, ""))
            return "" if reference is None or reference.expired() else name
        return ""


@dataclass
class RecordedStep:
    """The rows of the step that is being recorded."""

    data: dict[str, Any] = field(default_factory=dict)
    stacks: dict[str, list[str]] = field(default_factory=dict)
    parents: dict[str, str | None] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # file name -> value
    calls: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)  # the notes that say what is not recorded
    exception: tuple[str, str] | None = None  # the call that raised, and what
    makers: Makers = field(default_factory=Makers)
    models: list[tuple[str, nn.Module]] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)  # of the models, by id
    roots: set[str] = field(default_factory=set)  # calls of the models that start() received
    uncalled: set[str] = field(
        default_factory=set
    )  # modules whose parameters are in the row of an outer module
    scope_begun: bool = False  # whether the first call of `scope` was
    scope_ended: bool = False  # whether its last call was


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
