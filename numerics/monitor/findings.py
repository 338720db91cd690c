"""Name what is wrong in the tables of one run, without a second run: facts, and the tensor that differs from its like.

    a rank whose gradient of a parameter is 0 where another rank's is not       lost before the reduction
    a parameter with a gradient and an update of 0, in every monitored step     not in the optimizer, or frozen
    an update over 100 times that of every parameter of its role                another learning rate or scale
    a largest logit over 10 times that of every other attention                 exploding queries or keys
    moments or weights of 8 significant bits beside gradients of more           stored in bfloat16

The role of a parameter is its name without the number of its layer.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from numerics.monitor.tables import MOMENTS, TensorRow, rank_folders, read_table

UPDATE_FACTOR, LOGIT_FACTOR = 100.0, 10.0
LEAST_LOGIT = 10.0  # below it no softmax is saturated
LEAST_STEPS = 3  # in which an update is 0 or too large
LEAST_VALUES = 16  # of extremes; one of float32 has 8 significant bits with a probability of about 2^-15
COARSE = 5e-7  # relative error of a table with 6 digits or more


@dataclass(frozen=True)
class MonitorFinding:
    """One fact. step: the first in which it holds."""

    kind: str
    name: str
    step: int
    message: str


def find(folder: Path) -> list[MonitorFinding]:
    """Return what is wrong in the tables of <run>/monitor."""
    ranks = rank_folders(folder)
    found = list(_lost_gradients(ranks))
    for place in list(ranks.values())[:1]:  # the others have the same weights
        found += [*_updates(place), *_logits(place), *_coarse(place)]
    return sorted(found, key=lambda one: one.step)


def _column(folder: Path, kind: str, column: str) -> dict[int, dict[str, float]]:
    """Return step -> name -> value; empty where the table has no such column."""
    table = read_table(folder, kind)
    if column not in table.columns:
        return {}
    at, found = table.columns.index(column), dict[int, dict[str, float]]()
    for row in table.rows:
        found.setdefault(row.step, {})[row.name] = row.values[at]
    return found


def _lost_gradients(ranks: Mapping[int, Path]) -> Iterator[MonitorFinding]:
    norms = {rank: _column(place, "grad_unreduced", "norm") for rank, place in ranks.items()}
    if len(norms) < 2:
        return
    named: set[tuple[int, str]] = set()
    steps = sorted(set.intersection(*map(set, norms.values())))
    for step in steps:
        for rank, here in norms.items():
            others = [norms[other][step] for other in norms if other != rank]
            for name in dict.fromkeys(name for other in others for name in other):
                lost = not here[step].get(name, 0.0) and any(other.get(name, 0.0) > 0 for other in others)
                if lost and (rank, name) not in named:
                    named.add((rank, name))
                    message = f"rank {rank} has no gradient of {name} before the reduction, and other ranks have one"
                    yield MonitorFinding("grad_unreduced", name, step, message)


def _updates(folder: Path) -> Iterator[MonitorFinding]:
    ratios, gradients = _column(folder, "update_ratio", "ratio"), _column(folder, "grad_reduced", "norm")
    series: dict[str, dict[int, float]] = {}
    for step, values in ratios.items():
        for name, ratio in values.items():
            series.setdefault(name, {})[step] = ratio
    for name, mine in series.items():
        steps = sorted(mine)
        if len(steps) < LEAST_STEPS:
            continue
        if not any(mine.values()) and any(gradients.get(step, {}).get(name, 0.0) > 0 for step in steps):
            yield MonitorFinding(
                "update_ratio", name, steps[0], f"{name} has a gradient and is never updated"
            )
        alike = [other for other in series if other != name and _role(other) == _role(name)]
        large = [
            step
            for step in steps
            if alike and mine[step] > UPDATE_FACTOR * max(series[other].get(step, 0.0) for other in alike) > 0
        ]
        if len(large) >= LEAST_STEPS:
            message = f"updates of {name} are over {UPDATE_FACTOR:g} times those of {alike[0]} in {len(large)} steps"
            yield MonitorFinding("update_ratio", name, large[0], message)


def _role(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _logits(folder: Path) -> Iterator[MonitorFinding]:
    named: set[str] = set()
    for step, values in sorted(_column(folder, "attention", "logit_max").items()):
        for name, value in values.items():
            others = [abs(other) for key, other in values.items() if key != name]
            if name not in named and others and value > max(LEAST_LOGIT, LOGIT_FACTOR * max(others)):
                named.add(name)
                message = f"the largest logit of {name} is {value:.3g}, those of the others at most {max(others):.3g}"
                yield MonitorFinding("attention", name, step, message)


def _coarse(folder: Path) -> Iterator[MonitorFinding]:
    gradients = read_table(folder, "grad_reduced")
    if _is_coarse(_extremes(gradients.rows, gradients.columns)) is not False:
        return  # the run computes in bfloat16, or has no gradients to compare with
    for kind in (*MOMENTS, "param"):
        table = read_table(folder, kind)
        if _is_coarse(_extremes(table.rows, table.columns)):
            message = f"{kind} has 8 significant bits, as in bfloat16, and the gradients have more"
            yield MonitorFinding(kind, kind, table.rows[0].step, message)


def _extremes(rows: Sequence[TensorRow], columns: Sequence[str]) -> set[float]:
    places = [columns.index(name) for name in ("min", "max") if name in columns]
    values = {row.values[place] for row in rows for place in places}
    return {value for value in values if value not in (0.0, 1.0) and abs(value) < float("inf")}


def _is_coarse(values: set[float]) -> bool | None:
    """Whether all values have 8 significant bits; None for too few values."""
    if len(values) < LEAST_VALUES:
        return None
    return all(abs(_bfloat16(value) - value) <= COARSE * abs(value) for value in values)


def _bfloat16(value: float) -> float:
    """Round to bfloat16; ties away from zero, which no exact value has."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (rounded,) = struct.unpack("<f", struct.pack("<I", min((bits + 0x8000) & 0xFFFF0000, 0xFFFFFFFF)))
    return float(rounded)
