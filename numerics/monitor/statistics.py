"""Statistics of many tensors on their device, without synchronisation. `Pending` transfers all of a step at once.

On a CPU a tensor is read in chunks that fit in the cache: 20 times faster there than the lists of another device. On
another device a list of tensors takes about 30 operations, whatever their number, and nothing waits for the host
(numerics.monitor.reduction.device). A hook has one tensor at a time: it is copied, and the copies are a list. Chunks,
and micro-batches, are joined on the host in float64 (Chan, Golub, LeVeque 1979).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from numerics.monitor.reduction.cpu import CPU_CHUNK, cpu_row, update_on_cpu
from numerics.monitor.reduction.device import (
    DEVICE_BATCH,
    DEVICE_CHUNK,
    WIDTH,
    fused,
    moments_of_sums,
    reduce_many,
    reduce_one,
)
from numerics.monitor.reduction.moments import Moments
from numerics.monitor.reduction.readable import readable, real

FEW = 3  # tensors: fewer are copied, and computed in a later list
Key = tuple[str, str]  # kind, name
Decode = Callable[[int, Sequence[float]], Moments]


@dataclass
class StatisticsEntry:
    """Keys with their rows. counts: elements of each part, None for rows of add_values. zeros: elements not stored.

    problem: why its tensor could not be read.
    """

    keys: list[Key]
    counts: list[int] | None = None
    rows: list[tuple[int, int]] = field(default_factory=list)  # (block, row of it)
    decode: Decode = lambda count, row: Moments(count, *row[:7])
    zeros: int = 0
    problem: str = ""


class Pending:
    """Statistics of a step that lie on the devices until `take`.

    problems: key -> why it has no statistics. A tensor that cannot be read raises nothing.
    """

    def __init__(self) -> None:
        self.problems: dict[Key, str] = {}
        self._blocks: list[Tensor] = []  # rows of WIDTH numbers
        self._entries: list[StatisticsEntry] = []
        self._latest: dict[Key, StatisticsEntry] = {}
        self._copies: list[tuple[StatisticsEntry, Tensor]] = []  # to be computed in a list
        self._copied = 0  # elements of the copies

    def add(self, keys: Sequence[Key], tensors: Sequence[Tensor]) -> None:
        """Add the statistics of tensors; several of one key are joined."""
        with torch.no_grad():
            lists: list[tuple[StatisticsEntry, Tensor]] = []
            for key, tensor in zip(keys, tensors, strict=True):
                entry = self._latest[key] = StatisticsEntry([key], [])
                self._entries.append(entry)
                try:
                    tensor, entry.zeros = readable(tensor)
                    if tensor.numel() and on_host(tensor):
                        parts = tensor.detach().reshape(-1).split(CPU_CHUNK)
                        rows = torch.tensor([[*cpu_row(part), 0.0] for part in parts], dtype=torch.float64)
                        self._append([(entry, part.numel()) for part in parts], rows)
                    elif tensor.numel() and fused(tensor.device.type, tensor.dtype):
                        lists.append((entry, tensor))
                    elif tensor.numel():
                        parts = tensor.reshape(-1).split(DEVICE_CHUNK)
                        rows = torch.stack([reduce_one(part) for part in parts])
                        self._append([(entry, part.numel()) for part in parts], rows)
                except Exception as error:
                    entry.problem = reason(error)
            try:
                if len(lists) >= FEW:
                    self._reduce(lists)
                else:
                    self._copy(lists)
            except Exception as error:
                for entry, _ in lists:
                    entry.problem = reason(error)

    def fail(self, key: Key, error: Exception) -> None:
        """Note why a key has no statistics."""
        self.problems.setdefault(key, reason(error))

    def _copy(self, lists: Sequence[tuple[StatisticsEntry, Tensor]]) -> None:
        """Copy tensors that may change before `take`, and compute the copies where they are many elements."""
        self._copies += [(entry, tensor.clone()) for entry, tensor in lists]
        self._copied += sum(tensor.numel() for _, tensor in lists)
        if self._copied > DEVICE_BATCH:
            self._flush()

    def _flush(self) -> None:
        copies, self._copies, self._copied = self._copies, [], 0
        try:
            self._reduce(copies)
        except Exception as error:
            for entry, _ in copies:
                entry.problem = reason(error)

    def _reduce(self, lists: Sequence[tuple[StatisticsEntry, Tensor]]) -> None:
        """Add the rows of tensors by one list of each device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[StatisticsEntry, Tensor]]] = {}
        for entry, tensor in lists:
            entry.decode = moments_of_sums
            group = groups.setdefault((tensor.device, tensor.dtype), [])
            group += [(entry, part) for part in dense_parts(tensor)]
        for group in groups.values():
            for batch in batches(group):
                rows = reduce_many([part for _, part in batch])
                self._append([(entry, part.numel()) for entry, part in batch], rows)

    def _append(self, parts: Sequence[tuple[StatisticsEntry, int]], rows: Tensor) -> None:
        for row, (entry, count) in enumerate(parts):
            assert entry.counts is not None
            entry.counts.append(count)
            entry.rows.append((len(self._blocks), row))
        self._blocks.append(rows)

    def replace(self, key: Key, tensor: Tensor) -> None:
        """Add the statistics of a tensor in place of those that were added last for its key."""
        if key in self._latest:
            self._latest[key].keys.remove(key)
        self.add([key], [tensor])

    def alias(self, key: Key, other: Key) -> None:
        """Give `key` the statistics that were added last for `other`."""
        self._latest[other].keys.append(key)

    def add_values(self, keys: Sequence[Key], values: Tensor) -> None:
        """Add a row of at most WIDTH numbers for each key: values (keys, width)."""
        rows = torch.zeros(len(keys), WIDTH, dtype=values.dtype, device=values.device)
        rows[:, : values.shape[1]] = values
        self._entries += [
            StatisticsEntry([key], None, [(len(self._blocks), row)]) for row, key in enumerate(keys)
        ]
        self._blocks.append(rows)

    def take(self) -> tuple[dict[Key, Moments], dict[Key, list[list[float]]]]:
        """Transfer everything, once a device. Returns the joined statistics, and the rows of add_values."""
        with torch.no_grad():
            self._flush()
        moments: dict[Key, Moments] = {}
        values: dict[Key, list[list[float]]] = {}
        blocks = _transferred(self._blocks)
        for entry in self._entries:
            if entry.problem:
                self.problems.update(dict.fromkeys(entry.keys, entry.problem))
                continue
            rows = [blocks[block][row] for block, row in entry.rows]
            if entry.counts is None:
                values.setdefault(entry.keys[0], []).extend(rows)
                continue
            whole = Moments(entry.zeros, low=0.0, high=0.0) if entry.zeros else Moments()
            for count, row in zip(entry.counts, rows, strict=True):
                whole = whole.joined(entry.decode(count, row))
            for key in entry.keys:
                moments[key] = moments.get(key, Moments()).joined(whole)
        self._blocks, self._entries, self._latest = [], [], {}
        for key in self.problems:
            moments.pop(key, None)
            values.pop(key, None)
        return moments, values


def reason(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(f"{error}".split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is in the CPU's memory."""
    return tensor.device.type == "cpu"


def dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor as it is, or in parts of at most DEVICE_BATCH elements. Gaps between elements are removed."""
    if not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)):
        tensor = tensor.contiguous()
    return [tensor] if tensor.numel() <= DEVICE_BATCH else tensor.reshape(-1).split(DEVICE_BATCH)


def batches(
    group: Sequence[tuple[StatisticsEntry, Tensor]],
) -> Iterable[list[tuple[StatisticsEntry, Tensor]]]:
    """Yield lists of at most DEVICE_BATCH elements together."""
    batch: list[tuple[StatisticsEntry, Tensor]] = []
    elements = 0
    for entry, part in group:
        if batch and elements + part.numel() > DEVICE_BATCH:
            yield batch
            batch, elements = [], 0
        batch.append((entry, part))
        elements += part.numel()
    if batch:
        yield batch


def _transferred(blocks: Sequence[Tensor]) -> list[list[list[float]]]:
    """Return the rows of all blocks, with one transfer for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for number, block in enumerate(blocks):
        by_device.setdefault(block.device, []).append(number)
    found: dict[int, list[list[float]]] = {}
    for numbers in by_device.values():
        whole = torch.cat([blocks[number] for number in numbers]).tolist()
        at = 0
        for number in numbers:
            found[number] = whole[at : at + len(blocks[number])]
            at += len(blocks[number])
    return [found[number] for number in range(len(blocks))]


def sign_agreements(gradients: Sequence[Tensor], moments: Sequence[Tensor]) -> Tensor:
    """Return (mean of sign(gradient) x sign(moment) + 1) / 2 of each pair, (n,) float32. The sign of nan is 0.

    Real and imaginary parts count as two elements.
    """
    signs = list(torch._foreach_sign([real(gradient) for gradient in gradients]))
    torch._foreach_mul_(signs, torch._foreach_sign([real(moment) for moment in moments]))
    return (torch.stack([one.mean(dtype=torch.float32) for one in signs]) + 1) / 2


def update_ratios(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """Return |after - before| / |before| of each pair, (n,); 0 without a change. May overwrite `before`.

    Squares are summed in float64 where the device has it, else in float32.
    """
    before, after = [real(tensor) for tensor in before], [real(tensor) for tensor in after]
    if all(on_host(tensor) for tensor in before):
        pairs = [update_on_cpu(one, other) for one, other in zip(before, after, strict=True)]
        weights, changes = torch.tensor(pairs, dtype=torch.float64).T.sqrt()
    else:
        whole = all(fused(tensor.device.type, tensor.dtype) for tensor in before)
        dtype = torch.float64 if whole else torch.float32
        weights = torch.stack(torch._foreach_norm(list(before), 2, dtype=dtype))
        torch._foreach_sub_(list(before), list(after))
        changes = torch.stack(torch._foreach_norm(list(before), 2, dtype=dtype))
    return torch.where(changes == 0, torch.zeros_like(changes), changes / weights)
