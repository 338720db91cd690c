"""Statistics of many tensors on their device, without synchronisation. `Pending` transfers all of a step at once.

A tensor gives a row of sums and extremes, from which the host computes its statistics. On a CPU it is read in chunks
that fit in the cache. With CUDA a list of tensors takes about 30 foreach operations, whatever their number: sums and
counts are accumulated in float64 from the elements as they are, and the deviation is the square root of a difference,
exact to 1e-7 of the mean. Tensors of other devices are copied to the CPU. Parts and micro-batches are joined in float64
(Chan, Golub, LeVeque 1979).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

WIDTH = 8  # numbers of a row
CPU_CHUNK = 2**16  # elements of float32 and a copy of them: half a megabyte
CANCELLED = 0.5  # below this part of the squares, deviations are computed from the mean in float64
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DEVICE_BATCH = 2**26  # elements of a list: the operations need one copy of it, 256 MiB in float32
NO_DEVIATION = 1e-14  # of the squares: the rounding of their sum in float64
NAN, INF = math.nan, math.inf
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
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
            _least(self.low, other.low),
            -_least(-self.high, -other.high),
            self.nonzero + other.nonzero,
            self.nan + other.nan,
            self.inf + other.inf,
        )

    def statistic(self, name: str) -> float:
        """Return a column of numerics.monitor.tables.STATISTICS. An empty tensor has nan."""
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
        return NAN if self.inf else math.sqrt(max(self.deviations, 0.0) / self.count)


def _least(one: float, other: float) -> float:
    return NAN if math.isnan(one) or math.isnan(other) else min(one, other)


@dataclass
class StatisticsEntry:
    """Keys with their rows."""

    keys: list[Key]
    counts: list[int] | None = None  # elements of each part; None for rows of add_values
    rows: list[tuple[int, int]] = field(default_factory=list)  # (block, row of it)
    decode: Callable[[int, Sequence[float]], Moments] = lambda count, row: Moments(count, *row[:7])
    zeros: int = 0  # elements that a sparse tensor does not store
    problem: str = ""  # why its tensor could not be read


class Pending:
    """Statistics of a step that lie on the devices until `take`.

    problems: key -> why it has no statistics. A tensor that cannot be read raises nothing.
    """

    def __init__(self) -> None:
        self.problems: dict[Key, str] = {}
        self._blocks: list[Tensor] = []  # rows of WIDTH numbers
        self._entries: list[StatisticsEntry] = []
        self._latest: dict[Key, StatisticsEntry] = {}

    def add(self, keys: Sequence[Key], tensors: Sequence[Tensor]) -> None:
        """Add the statistics of tensors; several of one key are joined."""
        lists: dict[tuple[torch.device, torch.dtype], list[tuple[StatisticsEntry, Tensor]]] = {}
        with torch.no_grad():
            for key, tensor in zip(keys, tensors, strict=True):
                entry = self._latest[key] = StatisticsEntry([key], [])
                self._entries.append(entry)
                try:
                    tensor, entry.zeros = readable(tensor)
                    if not tensor.numel():
                        continue
                    if fused(tensor):
                        entry.decode = moments_of_sums
                        group = lists.setdefault((tensor.device, tensor.dtype), [])
                        group += [(entry, part) for part in dense_parts(tensor)]
                        continue
                    parts = tensor.detach().cpu().reshape(-1).split(CPU_CHUNK)
                    rows = torch.tensor([[*cpu_row(part), 0.0] for part in parts], dtype=torch.float64)
                    self._append([(entry, part.numel()) for part in parts], rows)
                except Exception as error:
                    entry.problem = reason(error)
            for batch in (batch for group in lists.values() for batch in batches(group)):
                try:
                    rows = reduce_many([part for _, part in batch])
                    self._append([(entry, part.numel()) for entry, part in batch], rows)
                except Exception as error:
                    for entry, _ in batch:
                        entry.problem = reason(error)

    def _append(self, parts: Sequence[tuple[StatisticsEntry, int]], rows: Tensor) -> None:
        for row, (entry, count) in enumerate(parts):
            assert entry.counts is not None
            entry.counts.append(count)
            entry.rows.append((len(self._blocks), row))
        self._blocks.append(rows)

    def fail(self, key: Key, error: Exception) -> None:
        """Note why a key has no statistics."""
        self.problems.setdefault(key, reason(error))

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


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor is in the CPU's memory."""
    return tensor.device.type == "cpu"


# -- elements


def readable(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the stored elements, dense and real, and how many zeros of the tensor are not stored.

    A complex tensor has two real elements for each of its own. A nested tensor has those of all its parts.
    """
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        stored = tensor = torch.cat(parts) if parts else torch.empty(0)
    elif tensor.layout == torch.sparse_coo:
        stored = tensor.coalesce().values()
    elif tensor.layout in COMPRESSED:
        stored = tensor.values()
    elif tensor.layout != torch.strided:
        stored = tensor = tensor.to_dense()
    else:
        stored = tensor
    absent = tensor.numel() - stored.numel()
    return real(stored), 2 * absent if stored.is_complex() else absent


def real(tensor: Tensor) -> Tensor:
    """Return a dense tensor with real elements: pairs of real and imaginary parts of a complex one."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor as it is, or in parts of at most DEVICE_BATCH elements. Gaps between elements are removed."""
    if not (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)):
        tensor = tensor.contiguous()
    return [tensor] if tensor.numel() <= DEVICE_BATCH else tensor.reshape(-1).split(DEVICE_BATCH)


def batches(
    group: Sequence[tuple[StatisticsEntry, Tensor]],
) -> Iterator[list[tuple[StatisticsEntry, Tensor]]]:
    """Yield lists of at most DEVICE_BATCH elements together."""
    batch: list[tuple[StatisticsEntry, Tensor]] = []
    for entry, part in group:
        if batch and sum(one.numel() for _, one in batch) + part.numel() > DEVICE_BATCH:
            yield batch
            batch = []
        batch.append((entry, part))
    yield batch


# -- sums


def cpu_row(part: Tensor) -> list[float]:
    """Return the Moments of one part after its count.

    numpy's comparisons and extremes take half the time of torch's, measured on one thread.
    """
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


def reduce_many(tensors: list[Tensor]) -> Tensor:
    """Return one row for each tensor, (n, WIDTH) float64.

    tensors: of one device and one of FUSED_DTYPES; dense, not empty.
    """
    count = functools.partial(torch._foreach_norm, ord=1, dtype=torch.float64)
    root = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    work = torch._foreach_neg(tensors)
    lowest = _largest(work)
    torch._foreach_clamp_min_(work, 0)
    below = count(work)  # the sum of the negative elements, without its sign
    torch._foreach_copy_(work, tensors)
    torch._foreach_clamp_min_(work, 0)
    above = count(work)
    torch._foreach_copy_(work, tensors)
    torch._foreach_sign_(work)  # 0 of nan
    nonzero = count(work)
    torch._foreach_copy_(work, tensors)
    torch._foreach_abs_(work)
    torch._foreach_add_(work, 1)
    torch._foreach_sign_(work)
    numbers = count(work)  # inf is one, nan is none
    torch._foreach_copy_(work, tensors)
    torch._foreach_mul_(work, 0)  # nan of inf
    torch._foreach_add_(work, 1)
    torch._foreach_sign_(work)
    finite = count(work)
    sums = torch.stack([*root, *below, *above, *nonzero, *numbers, *finite])
    extremes = torch.stack([*lowest, *_largest(tensors)]).double()
    return torch.cat([sums, extremes]).view(WIDTH, len(tensors)).T.contiguous()


def _largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest element of each tensor, by one operation for each size.

    In a list of several sizes CUDA's kernel also compares with 0 (output_per_tensor of torch's ForeachReduceOp.cu).
    """
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.numel(), []).append(place)
    found: dict[int, Tensor] = {}
    for same in places.values():
        found.update(zip(same, torch._foreach_max([tensors[place] for place in same]), strict=True))
    return [found[place] for place in range(len(tensors))]


def moments_of_sums(count: int, row: Sequence[float]) -> Moments:
    """Return the statistics of a tensor with `count` elements, of its row of `reduce_many`."""
    root, below, above, nonzero, numbers, finite, lowest, high = row
    nan, inf, low = count - numbers, numbers - finite, -lowest
    if nan:
        low = high = NAN
    elif inf == count:  # CUDA's kernel has no extreme below the smallest number
        low, high = -INF if below else INF, INF if above else -INF
    if nan or inf:
        return Moments(count, 0.0, 0.0, low, high, nonzero + nan, nan, inf)
    mean, squares = (above - below) / count, root * root
    deviations = squares - count * mean * mean if math.isfinite(squares) else INF
    deviations = deviations if deviations > NO_DEVIATION * squares else 0.0
    return Moments(count, mean, deviations, low, high, nonzero)


def fused(tensor: Tensor) -> bool:
    """Whether `reduce_many` is right for a tensor: another device may lack float64 or treat NaN in another way."""
    return tensor.device.type == "cuda" and tensor.dtype in FUSED_DTYPES


# -- pairs of tensors


def update_ratios(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """Return |after - before| / |before| of each pair, (n,); 0 without a change. May overwrite `before`.

    Squares are summed in float64 on a CPU and with CUDA, else in float32.
    """
    before, after = [real(tensor) for tensor in before], [real(tensor) for tensor in after]
    if all(on_host(tensor) for tensor in before):
        pairs = [_update_on_cpu(one, other) for one, other in zip(before, after, strict=True)]
        weights, changes = torch.tensor(pairs, dtype=torch.float64).T.sqrt()
    else:
        whole = all(fused(tensor) for tensor in before)
        dtype = torch.float64 if whole else torch.float32
        weights = torch.stack(torch._foreach_norm(list(before), 2, dtype=dtype))
        torch._foreach_sub_(list(before), list(after))
        changes = torch.stack(torch._foreach_norm(list(before), 2, dtype=dtype))
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
