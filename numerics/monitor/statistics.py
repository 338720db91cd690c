"""Statistics of many tensors on their device, without synchronisation. `Pending` transfers all of a step at once.

On a CPU a tensor is read in chunks that fit in the cache, so each element comes from memory once. On another device
nothing waits for the host: about ten kernels for each tensor. Chunks, and micro-batches, are joined on the host in
float64 (Chan, Golub, LeVeque 1979), so a mean or a deviation of any length is exact to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CPU_CHUNK = 2**16  # elements of float32 and a copy of them: half a megabyte
DEVICE_CHUNK = 2**24  # elements; counts up to it are exact in float32, and it bounds converted copies
CANCELLED = 0.5  # below this part of the squares, deviations are computed from the mean in float64
PARTS = 7  # of a chunk: mean, sum of squared deviations, min, max, non-zero elements, nan, inf


@dataclass(frozen=True)
class Moments:
    """Joined statistics of `count` elements. deviations: sum of squared deviations from the mean."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    nonzero: float = 0.0
    nan: float = 0.0
    inf: float = 0.0

    def joined(self, other: Moments) -> Moments:
        """Return the statistics of both."""
        if not self.count:
            return other
        count = self.count + other.count
        step = other.mean - self.mean
        weight = other.count / count
        return Moments(
            count,
            self.mean + step * weight,
            self.deviations + other.deviations + step * step * self.count * weight,
            _least(self.low, other.low),
            -_least(-self.high, -other.high),
            self.nonzero + other.nonzero,
            self.nan + other.nan,
            self.inf + other.inf,
        )

    def statistic(self, name: str) -> float:
        """Return a column of numerics.monitor.tables.STATISTICS. An empty tensor has nan."""
        if not self.count:
            return 0.0 if name in ("nan", "inf") else math.nan
        if name in ("nan", "inf"):
            return float(getattr(self, name))
        if name == "zeros":
            return 1.0 - self.nonzero / self.count
        if self.nan:
            return math.nan
        if name in ("min", "max"):
            return self.low if name == "min" else self.high
        if name == "mean":
            if self.inf:
                return self.low + self.high  # nan of both infinities
            return self.mean
        if name == "norm":
            return math.inf if self.inf else math.sqrt(self.deviations + self.count * self.mean**2)
        return math.nan if self.inf else math.sqrt(max(self.deviations, 0.0) / self.count)


def _least(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else min(one, other)


Key = tuple[str, str]  # kind, name


class Pending:
    """Statistics of a step that lie on the devices until `take`."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # rows of PARTS numbers
        self._entries: list[tuple[list[Key], Sequence[int] | None]] = []  # with the elements of each row
        self._latest: dict[Key, int] = {}

    def add(self, keys: Sequence[Key], tensors: Sequence[Tensor]) -> None:
        """Add the statistics of tensors; several of one key are joined."""
        with torch.no_grad():
            for key, tensor in zip(keys, tensors, strict=True):
                counts, rows = _chunks(tensor)
                self._latest[key] = len(self._entries)
                self._entries.append(([key], counts))
                if rows is not None:
                    self._blocks.append(rows)

    def replace(self, key: Key, tensor: Tensor) -> None:
        """Add the statistics of a tensor in place of those that were added last for its key."""
        if key in self._latest:
            self._entries[self._latest[key]][0].remove(key)
        self.add([key], [tensor])

    def alias(self, key: Key, other: Key) -> None:
        """Give `key` the statistics that were added last for `other`."""
        self._entries[self._latest[other]][0].append(key)

    def add_values(self, keys: Sequence[Key], values: Tensor) -> None:
        """Add a row of at most PARTS numbers for each key: values (keys, width)."""
        rows = torch.zeros(len(keys), PARTS, dtype=values.dtype, device=values.device)
        rows[:, : values.shape[1]] = values
        self._entries += [([key], None) for key in keys]
        self._blocks.append(rows)

    def take(self) -> tuple[dict[Key, Moments], dict[Key, list[list[float]]]]:
        """Transfer everything, once a device. Returns the joined statistics, and the rows of add_values."""
        moments: dict[Key, Moments] = {}
        values: dict[Key, list[list[float]]] = {}
        rows = iter(_transferred(self._blocks))
        for keys, counts in self._entries:
            if counts is None:
                values.setdefault(keys[0], []).append(next(rows))
                continue
            whole = Moments()
            for count in counts:
                whole = whole.joined(Moments(count, *next(rows)))
            for key in keys:
                moments[key] = moments.get(key, Moments()).joined(whole)
        self._blocks, self._entries, self._latest = [], [], {}
        return moments, values


def _transferred(blocks: Sequence[Tensor]) -> Iterable[list[float]]:
    """Return the rows of all blocks, in order, with one transfer for each device."""
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
    for number in range(len(blocks)):
        yield from found[number]


def _chunks(tensor: Tensor) -> tuple[list[int], Tensor | None]:
    """Return the elements of each chunk, and their rows (chunks, PARTS) on the tensor's device."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return [], None
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.device.type == "cpu":
        parts = flat.split(CPU_CHUNK)
        rows = torch.tensor([_on_cpu(part) for part in parts], dtype=torch.float64)
    else:
        parts = flat.split(DEVICE_CHUNK)
        rows = torch.stack([_on_device(part) for part in parts])
    return [part.numel() for part in parts], rows


def _on_cpu(part: Tensor) -> list[float]:
    """One chunk. numpy's comparisons and extremes take half the time of torch's, measured on one thread."""
    part = part if part.dtype in (torch.float32, torch.float64) else part.float()
    values = part.numpy()
    low, high = float(values.min()), float(values.max())  # nan where one element is
    nonzero = float(np.count_nonzero(values != 0)) if not (low > 0 or high < 0) else float(part.numel())
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 0.0, low, high, nonzero, float(np.isnan(values).sum()), float(np.isinf(values).sum())]
    mean, squares = float(part.mean()), float(torch.dot(part, part))
    deviations = squares - part.numel() * mean * mean
    if not deviations > CANCELLED * squares or not math.isfinite(squares):
        centred = part.double() - part.double().mean()
        mean, deviations = float(part.double().mean()), float(torch.dot(centred, centred))
    return [mean, deviations, low, high, nonzero, 0.0, 0.0]


def _on_device(part: Tensor) -> Tensor:
    part = part if part.dtype in (torch.float32, torch.float64) else part.float()
    low, high = part.aminmax()
    variance, mean = torch.var_mean(part, correction=0)
    finite = low.isfinite() & high.isfinite()
    zero = torch.zeros_like(mean)
    return torch.stack(
        [
            torch.where(finite, mean, zero),
            torch.where(finite, variance * part.numel(), zero),
            low,
            high,
            part.count_nonzero(),
            part.isnan().sum(),
            part.isinf().sum(),
        ]
    ).float()


def update_ratios(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """Return |after - before| / |before| of each pair, (n,); 0 without a change. May overwrite `before`."""
    if all(tensor.device.type == "cpu" for tensor in before):
        pairs = [_update_on_cpu(one, other) for one, other in zip(before, after, strict=True)]
        weights, changes = torch.tensor(pairs, dtype=torch.float64).T.sqrt()
    else:
        weights = torch.stack(list(torch._foreach_norm(list(before), 2, dtype=torch.float32)))
        torch._foreach_sub_(list(before), list(after))
        changes = torch.stack(list(torch._foreach_norm(list(before), 2, dtype=torch.float32)))
    return torch.where(changes == 0, torch.zeros_like(changes), changes / weights)


def _update_on_cpu(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the sums of squares of `before` and of the change, in chunks that fit in the cache."""
    weights = changes = 0.0
    pairs = zip(before.reshape(-1).split(CPU_CHUNK), after.detach().reshape(-1).split(CPU_CHUNK), strict=True)
    for one, other in pairs:
        one, other = (part if part.dtype == torch.float64 else part.float() for part in (one, other))
        weights += float(torch.dot(one, one))
        change = other - one
        changes += float(torch.dot(change, change))
    return weights, changes
