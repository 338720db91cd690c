"""Statistics of many tensors on their device, without synchronisation. `Pending` transfers all of a step at once.

A tensor gives rows of sums and extremes, from which the host computes its statistics. On a CPU it is read in chunks
that fit in the cache, on another device in about 16 operations, in float64 where the device has it. Parts and
micro-batches are joined in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from referee.errors import described
from referee.numerics.describe import WITHOUT_FLOAT64, plain_values

WIDTH = 7  # numbers of a row
CPU_CHUNK = 2**16  # elements of float32 and a copy of them: half a megabyte
DEVICE_CHUNK = 2**25  # elements: a copy of them in float64 takes 256 MiB
CANCELLED = 0.5  # below this part of the squares, deviations are computed from the mean in float64
NAN, INF = math.nan, math.inf
Key = tuple[str, str]  # kind, name


def joined(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return monitor_tables.STATISTICS of parts, each a count and its row. Without elements nan."""
    count, mean, deviations, low, high, nonzero, nan, inf = np.array(rows).reshape(-1, WIDTH + 1).T
    sums = {"nan": float(nan.sum()), "inf": float(inf.sum())}
    total = float(count.sum())
    if not total:
        return dict.fromkeys(("norm", "mean", "min", "max", "std", "zeros"), NAN) | sums
    found = {"zeros": 1.0 - float(nonzero.sum()) / total} | sums
    if sums["nan"]:
        return dict.fromkeys(("norm", "mean", "min", "max", "std"), NAN) | found
    found |= {"min": float(low.min()), "max": float(high.max())}
    if sums["inf"]:  # the mean of both infinities is nan
        return {"norm": INF, "mean": found["min"] + found["max"], "std": NAN} | found
    middle = float((count * mean).sum()) / total
    spread = float((deviations + count * (mean - middle) ** 2).sum())
    norm, std = math.sqrt(spread + total * middle * middle), math.sqrt(spread / total)
    return {"norm": norm, "mean": middle, "std": std} | found


@dataclass
class StatisticsEntry:
    """Keys with the rows of their tensor."""

    keys: list[Key]
    rows: Tensor = field(default_factory=lambda: torch.empty(0, WIDTH))  # (parts, numbers)
    counts: list[int] | None = None  # elements of each part; None for numbers of add_values


class Pending:
    """Statistics of a step that lie on the devices until `take`.

    problems: key -> why it has no statistics. A tensor that cannot be read raises nothing.
    """

    def __init__(self) -> None:
        self.problems: dict[Key, str] = {}
        self._entries: list[StatisticsEntry] = []
        self._latest: dict[Key, StatisticsEntry] = {}

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add the statistics of a tensor; several of one key are joined."""
        entry = self._latest[key] = StatisticsEntry([key], counts=[])
        self._entries.append(entry)
        try:
            with torch.no_grad():
                parts = chunks(real_elements(tensor))
                if parts:
                    entry.rows = moments_rows(parts)
                    entry.counts = [part.numel() for part in parts]
        except Exception as error:
            self.fail(key, error)

    def replace(self, key: Key, tensor: Tensor) -> None:
        """Add the statistics of a tensor in place of those that were added last for its key."""
        if key in self._latest:
            self._latest[key].keys.remove(key)
        self.add(key, tensor)

    def alias(self, key: Key, other: Key) -> None:
        """Give `key` the statistics that were added last for `other`."""
        self._latest[other].keys.append(key)
        if other in self.problems:
            self.problems[key] = self.problems[other]

    def add_values(self, key: Key, values: Tensor) -> None:
        """Add at most WIDTH numbers for a key: values (width,)."""
        row = torch.nn.functional.pad(values, (0, WIDTH - len(values)))
        self._entries.append(StatisticsEntry([key], row[None]))

    def fail(self, key: Key, error: Exception) -> None:
        """Note why a key has no statistics."""
        self.problems.setdefault(key, described(error))

    def take(self) -> tuple[dict[Key, dict[str, float]], dict[Key, list[list[float]]]]:
        """Transfer everything, once a device. Returns the joined statistics, and the numbers of add_values."""
        parts: dict[Key, list[list[float]]] = {}
        values: dict[Key, list[list[float]]] = {}
        devices: dict[torch.device, list[StatisticsEntry]] = {}
        for entry in self._entries:
            devices.setdefault(entry.rows.device, []).append(entry)
        for entries in devices.values():
            rows = iter(torch.cat([entry.rows for entry in entries]).tolist())
            for entry in entries:
                if entry.counts is None:
                    values.setdefault(entry.keys[0], []).append(next(rows))
                    continue
                counted = [[count, *next(rows)] for count in entry.counts]
                for key in entry.keys:
                    parts.setdefault(key, []).extend(counted)
        self._entries, self._latest = [], {}
        for key in self.problems:
            parts.pop(key, None)
            values.pop(key, None)
        return {key: joined(rows) for key, rows in parts.items()}, values


# -- elements


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is in the CPU's memory."""
    return tensor.device.type == "cpu"


def real_elements(tensor: Tensor) -> Tensor:
    """Return the elements as a dense tensor. A complex one has two real elements for each."""
    tensor = plain_values(tensor).resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Return a dense tensor in flat parts that are read at once; none of an empty one."""
    if not tensor.numel():
        return ()
    parts: Sequence[Tensor] = tensor.reshape(-1).split(CPU_CHUNK if on_host(tensor) else DEVICE_CHUNK)
    return parts


def computed(part: Tensor) -> Tensor:
    """Return a part in the type in which it is computed with: float64, on a CPU float32 unless it is float64."""
    if on_host(part):
        return part if part.dtype == torch.float64 else part.float()
    return part.float() if part.device.type in WITHOUT_FLOAT64 else part.double()


# -- sums


def moments_rows(parts: Sequence[Tensor]) -> Tensor:
    """Return mean, squared deviations, min, max, and counts of nonzero, NaN and Inf of parts, (parts, WIDTH)."""
    if on_host(parts[0]):
        return torch.tensor([host_row(part) for part in parts], dtype=torch.float64)
    return torch.stack([device_row(part) for part in parts])


def host_row(part: Tensor) -> list[float]:
    """Compute a row with numpy's comparisons and extremes, which take half the time of torch's on one thread."""
    part = computed(part)
    values = part.numpy()
    low, high = float(values.min()), float(values.max())  # nan where one element is
    nonzero = float(np.count_nonzero(values != 0)) if not (low > 0 or high < 0) else float(part.numel())
    if not (math.isfinite(low) and math.isfinite(high)):
        return [0.0, 0.0, low, high, nonzero, float(np.isnan(values).sum()), float(np.isinf(values).sum())]
    mean, squares = float(part.mean()), float(torch.dot(part, part))
    deviations = squares - part.numel() * mean * mean
    if not deviations > CANCELLED * squares or not math.isfinite(squares):
        exact = part.double().mean()
        centred = part.double() - exact
        mean, deviations = float(exact), float(torch.dot(centred, centred))
    return [mean, deviations, low, high, nonzero, 0.0, 0.0]


def device_row(part: Tensor) -> Tensor:
    """Compute a row without waiting for the device."""
    part = computed(part)
    mean = part.mean()
    counts = [(part != 0).sum(), part.isnan().sum(), part.isinf().sum()]
    return torch.stack(
        [mean, (part - mean).square_().sum(), *part.aminmax(), *(one.to(part) for one in counts)]
    )


# -- pairs of tensors


def update_ratio(before: Tensor, after: Tensor) -> Tensor:
    """Return |after - before| / |before|, (1,); 0 without a change."""
    weights, changes = [], []
    for parts in zip(*(chunks(real_elements(tensor)) for tensor in (before, after)), strict=True):
        one, other = map(computed, parts)
        change = other - one
        weights.append(torch.dot(one, one))
        changes.append(torch.dot(change, change))
    if not weights:
        return torch.zeros(1)
    size, changed = (torch.stack(squares).sum(0, keepdim=True) for squares in (weights, changes))
    return torch.where(changed == 0, changed, (changed / size).sqrt())
