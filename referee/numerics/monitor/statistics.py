"""Statistics of many tensors on their device, without synchronisation. `Pending` transfers all of a step at once.

A tensor gives rows of sums and extremes, from which the host computes its statistics. On a CPU it is read in chunks
that fit in the cache, on another device in about 16 operations, in float64 where the device has it. Parts and
micro-batches are joined in float64 (Chan, Golub, LeVeque 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from referee.numerics.describe import WITHOUT_FLOAT64, plain_values

WIDTH = 7  # numbers of a row
CPU_CHUNK = 2**16  # elements of float32 and a copy of them: half a megabyte
DEVICE_CHUNK = 2**25  # elements: a copy of them in float64 takes 256 MiB
CANCELLED = 0.5  # below this part of the squares, deviations are computed from the mean in float64
NAN, INF = math.nan, math.inf
Key = tuple[str, str]  # kind, name


@dataclass(frozen=True)
class Moments:
    """Joined statistics of `count` elements. deviations: sum of squared deviations from the mean."""

    count: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    low: float = INF
    high: float = -INF
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
            min(self.low, other.low),
            max(self.high, other.high),
            self.nonzero + other.nonzero,
            self.nan + other.nan,
            self.inf + other.inf,
        )

    def statistic(self, name: str) -> float:
        """Return a column of referee.numerics.monitor.tables.STATISTICS. An empty tensor has nan."""
        if name in ("nan", "inf"):
            return float(getattr(self, name))
        if not self.count:
            return NAN
        if name == "zeros":
            return 1.0 - self.nonzero / self.count
        if self.nan:
            return NAN
        if name in ("min", "max"):
            return self.low if name == "min" else self.high
        if name == "mean":
            return self.low + self.high if self.inf else self.mean  # nan of both infinities
        if name == "norm":
            return INF if self.inf else math.sqrt(self.deviations + self.count * self.mean**2)
        return NAN if self.inf else math.sqrt(self.deviations / self.count)


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
        self.problems.setdefault(key, reason(error))

    def take(self) -> tuple[dict[Key, Moments], dict[Key, list[list[float]]]]:
        """Transfer everything, once a device. Returns the joined statistics, and the numbers of add_values."""
        moments: dict[Key, Moments] = {}
        values: dict[Key, list[list[float]]] = {}
        blocks = _transferred([entry.rows for entry in self._entries])
        for entry, rows in zip(self._entries, blocks, strict=True):
            if entry.counts is None:
                values.setdefault(entry.keys[0], []).extend(rows)
                continue
            whole = Moments()
            for count, row in zip(entry.counts, rows, strict=True):
                whole = whole.joined(Moments(count, *row))
            for key in entry.keys:
                moments[key] = moments.get(key, Moments()).joined(whole)
        self._entries, self._latest = [], {}
        for key in self.problems:
            moments.pop(key, None)
            values.pop(key, None)
        return moments, values


def _transferred(blocks: Sequence[Tensor]) -> list[list[list[float]]]:
    """Return the rows of all blocks, with one transfer for each device."""
    groups: dict[torch.device, list[int]] = {}
    for number, block in enumerate(blocks):
        groups.setdefault(block.device, []).append(number)
    found: dict[int, list[list[float]]] = {}
    for numbers in groups.values():
        rows = iter(torch.cat([blocks[number] for number in numbers]).tolist())
        found.update({number: [next(rows) for _ in range(len(blocks[number]))] for number in numbers})
    return [found[number] for number in range(len(blocks))]


def reason(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(f"{error}".split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


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
    """Return the Moments of parts of one tensor after their counts, (parts, WIDTH)."""
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
