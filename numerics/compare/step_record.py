"""The record of a step: its calls, and the values that they receive and return."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Value:
    """A recorded argument: a tensor where dtype is set, else a plain value.

    parts: of a joined tensor, concatenated along the axis; added where axis is None. unknown: why a tensor has neither
    statistics nor values; "" where it has. layout: of one that is not dense, as "torch.sparse_coo" or "nested".
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    highest: float | None = None
    lowest: float | None = None
    mean: float | None = None
    norm: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    checksum: str = ""
    any_order: str = ""  # a digest of the values in any order
    maker: str = ""  # the recorded call that returned the tensor
    file: Path | None = None
    requires_grad: bool | None = None
    is_parameter: bool = False
    plain: Any = None
    parts: tuple[Value, ...] = ()
    axis: int | None = None
    unknown: str = ""
    layout: str = ""

    @property
    def is_unknown(self) -> bool:
        """Return whether nothing of a tensor's values is known."""
        return bool(self.dtype and self.unknown) and not (self.checksum or self.has_values)

    @property
    def statistics(self) -> tuple[float | None, ...]:
        return self.highest, self.lowest, self.mean, self.norm

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def has_values(self) -> bool:
        """Return whether the values were recorded."""
        if self.parts:
            return all(part.has_values for part in self.parts)
        return self.file is not None and self.file.exists()

    @property
    def finite(self) -> bool:
        """False where a NaN or an infinity is in the tensor."""
        if self.nan_count is not None:
            return not (self.nan_count or self.inf_count)
        return all(math.isfinite(number) for number in self.statistics if number is not None)

    def describe(self) -> str:
        """Return the value in a few words."""
        if not self.dtype:
            return str(self.plain) if self.kind else "None"
        numbers = (
            f"{name} {number:.6g}"
            for name, number in zip(STATISTICS, self.statistics, strict=True)
            if number is not None
        )
        bad = ""
        if self.nan_count or self.inf_count:
            bad = f", {self.nan_count} NaN, {self.inf_count} Inf"
        return f"{self.dtype.removeprefix('torch.')} {list(self.shape)}: {', '.join(numbers)}{bad}"


STATISTICS = ("max", "min", "mean", "norm")


@dataclass(frozen=True)
class Call:
    """A call of a module or of a function, forward or backward.

    path: of the module, "" for the root; the label of a function, as in "Functional.gelu". number: of the call.
    inputs, parameters, outputs: by place, as in "0.hidden". gradients: of the module's parameters at the end of the
    step, at its last backward. raw: the row of dump.json. late: whether it is a function that the code calls outside
    of the modules after backward, of values that need no gradient: clipping, the optimizer.
    """

    name: str
    path: str
    type: str
    number: int
    backward: bool
    inputs: dict[str, Value]
    parameters: dict[str, Value]
    settings: dict[str, Any]
    outputs: dict[str, Value]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)
    gradients: dict[str, Value] = field(default_factory=dict)
    late: bool = False
    buffers: dict[str, Value] = field(default_factory=dict)  # that the call has written

    @property
    def writes_parameter(self) -> bool:
        """Return whether it is a function that overwrites a parameter, as an optimizer does."""
        first = next(iter(self.inputs.values()), None)
        return self.path[-1:] == "_" and first is not None and first.is_parameter

    @property
    def values(self) -> Iterator[Value]:
        for values in (self.inputs, self.parameters, self.outputs, self.gradients, self.buffers):
            yield from values.values()

    @property
    def is_module(self) -> bool:
        return bool(self.type)

    @property
    def forward_name(self) -> str:
        """Return the name of the forward of this call."""
        head, _, tail = self.name.rpartition("backward")
        return f"{head}forward{tail}" if self.backward else self.name


@dataclass(frozen=True)
class StepRecord:
    """The calls of a step of a rank, in the order of execution; an outer call before those within it.

    selection: the settings that say which calls are recorded: level, list, scope, data_mode. complete: whether every
    recorded row is there.
    """

    folder: Path
    calls: dict[str, Call]
    parents: dict[str, str | None]
    stacks: dict[str, list[str]]
    notes: list[str]
    by_msprobe: bool = False
    selection: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True
    incomplete: Sequence[str] = ()  # what is not recorded
    exception: tuple[str, str] | None = None  # the call that raised, and what
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # joined calls: the name that a call had -> its name

    def within(self, name: str) -> str | None:
        """Return the innermost recorded call around a call."""
        return next((outer for outer in self.around(name) if outer in self.calls), None)

    def around(self, name: str) -> Iterator[str]:
        """Yield the names of what is around a call, the innermost first, each once."""
        outer, visited = self.parents.get(name), {name}
        while outer is not None and outer not in visited:
            yield outer
            visited.add(outer)
            outer = self.parents.get(outer)
