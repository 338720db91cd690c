"""Read the files of a monitor: `<run>/monitor/rank<r>/<kind>_<first>-<last>.csv`, and those of msProbe.

Columns: vpp_stage, name, step, [micro_step,] and statistics. msProbe's folders are `<time>-rank<r>-<number>`; older
versions of it name the second column module_name or param_name, and statistics of activations `input.norm`.
Of a row that was written twice, as by a resumed run, the last one counts.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numerics.diagnose.loss_files import Curve, read_curve
from numerics.errors import NumericsError

Floats = NDArray[np.float32]
FILE = re.compile(r"(.+)_(\d+)-(\d+)\.csv")
RANK = re.compile(r"(?:[\w-]{0,20}-)?rank(\d{1,6})(?:-.*)?")
NAMES = ("name", "module_name", "param_name")
STATISTICS = ("norm", "mean", "min", "max", "std", "zeros", "nan", "inf", "ratio", "entropy", "logit_max")
ALIASES = {"nans": "nan", "infs": "inf"}
# Kinds in the order of a step's computation. backward: computed from the last layer to the first.
KINDS = (
    "param_origin",
    "actv",
    "attention",
    "actv_grad",
    "grad_unreduced",
    "grad_reduced",
    "grad_clipped",
    "mg_direction",
    "exp_avg",
    "exp_avg_sq",
    "update_ratio",
    "param_updated",
    "param",
)
BACKWARD = ("actv_grad", "grad_unreduced", "grad_reduced", "grad_clipped")
REGISTERED = (
    "param",
    "grad_reduced",
    "grad_clipped",
    "exp_avg",
)  # rows in the order of the model's parameters
LARGEST_STEP = 10**15
FIX = "name a run with CONFIG_MONITOR=y, or a folder with monitor files such as rank0/grad_reduced_0-99.csv"


@dataclass
class TrendTable:
    """One kind of tensor of one rank.

    values: statistic -> (tensors, steps); NaN also where there is no row. present: (tensors, steps), where a row is.
    """

    kind: str
    rank: int
    names: list[str]
    steps: NDArray[np.int64]
    values: dict[str, Floats]
    present: NDArray[np.bool_]


@dataclass
class Monitored:
    """The tables of a run by (kind, rank), its losses and its gradient norms where it logged them.

    dtype: of the computation, from run.json; "" where it is not known.
    """

    path: Path
    name: str
    tables: dict[tuple[str, int], TrendTable]
    losses: Curve = field(default_factory=dict)
    norms: Curve = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dtype: str = ""

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for _, rank in self.tables})

    def of_kind(self, kind: str) -> dict[int, TrendTable]:
        """Return rank -> table."""
        return {rank: table for (one, rank), table in sorted(self.tables.items()) if one == kind}


def kind_order(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def computation_order(run: Monitored, table: TrendTable) -> list[int]:
    """Return the place of each tensor of a table in the order of computation; the lowest is computed first.

    Rows of gradients are in the order of registration or of backward, by the writer. The order of backward is that of
    another table reversed: for gradients of activations that of the activations, else that of the parameters. Without
    such a table the order of the rows counts.
    """
    if table.kind not in BACKWARD:
        return list(range(len(table.names)))
    activations = table.kind == "actv_grad"
    for kind in ("actv",) if activations else REGISTERED:
        for other in run.of_kind(kind).values():
            places = {name: row for row, name in enumerate(other.names)}
            wanted = [name.replace("put_grad", "put") if activations else name for name in table.names]
            if all(name in places for name in wanted):
                return [-places[name] for name in wanted]
    return [row if activations else -row for row in range(len(table.names))]


def read_monitor(
    path: Path,
    name: str = "",
    losses: Path | None = None,
    kinds: Sequence[str] = (),
    statistics: Sequence[str] = (),
) -> Monitored:
    """Read a run's folder, a folder of ranks, or the folder of one rank. NumericsError names what cannot be read.

    losses: a file of losses and gradient norms; by default the metrics.jsonl of the run, if it has one. kinds,
    statistics: those to read; all by default.
    """
    if not path.is_dir():
        raise NumericsError(f"{path} is not a folder; fix: {FIX}")
    found = Monitored(path, name or str(path), {}, dtype=_dtype(path / "run.json"))
    for rank, folder in rank_folders(path):
        files: dict[str, list[tuple[int, Path]]] = {}
        for file in folder.iterdir():
            match = FILE.fullmatch(file.name)
            if match and (not kinds or match[1] in kinds):
                files.setdefault(match[1], []).append((int(match[2]), file))
        for kind, parts in files.items():
            table = _read_table(kind, rank, [file for _, file in sorted(parts)], statistics, found.notes)
            if table is not None:
                found.tables[kind, rank] = table
    if not found.tables:
        raise NumericsError(f"{path} has no monitor files{' of these kinds' if kinds else ''}; fix: {FIX}")
    file = losses or path / "metrics.jsonl"
    if losses or file.exists():
        curve = read_curve(file)
        found.losses, found.norms = curve.losses, curve.gradient_norms
    return found


def _dtype(record: Path) -> str:
    try:
        return str(json.loads(record.read_text(encoding="utf-8"))["target"]["dtype"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def has_monitor(path: Path) -> bool:
    """Whether a run's folder has monitor files."""
    return any(FILE.fullmatch(file.name) for _, folder in rank_folders(path) for file in folder.iterdir())


def rank_folders(path: Path) -> list[tuple[int, Path]]:
    """Return rank and folder of each rank; of several records of a rank, the last one by name."""
    base = path / "monitor" if (path / "monitor").is_dir() else path
    if not base.is_dir():
        return []
    folders = sorted(folder for folder in base.iterdir() if folder.is_dir())
    ranks = {int(match[1]): folder for folder in folders if (match := RANK.fullmatch(folder.name))}
    if not ranks and any(FILE.fullmatch(file.name) for file in base.iterdir()):
        match = RANK.fullmatch(base.name)
        ranks = {int(match[1]) if match else 0: base}
    return sorted(ranks.items())


def _read_table(
    kind: str, rank: int, files: Sequence[Path], wanted: Sequence[str], notes: list[str]
) -> TrendTable | None:
    """Read the files of one kind. None where they have no row."""
    names: dict[str, int] = {}
    blocks: list[_Block] = []
    damaged = 0
    for file in files:
        head, rows = _rows(file)
        if not head:  # the process was killed at its first line
            continue
        read = _blocks(file, head, rows, wanted, names)
        blocks += read
        damaged += len(rows) - (read[0].lines if read else 0)
    if damaged:
        notes.append(f"rank {rank}, {kind}: {damaged} damaged lines are left out")
    if not blocks:
        return None
    steps, at = np.unique(np.concatenate([block.steps for block in blocks]), return_inverse=True)
    rows_at = np.concatenate([block.rows for block in blocks])
    present = np.zeros((len(names), len(steps)), dtype=bool)
    present[rows_at, at] = True
    values = {}
    for word in STATISTICS:
        parts = [block.values.get(word) for block in blocks]
        if all(part is None for part in parts):
            continue
        column = [
            np.full(len(block.rows), np.nan) if part is None else part
            for block, part in zip(blocks, parts, strict=True)
        ]
        values[word] = np.full(present.shape, np.nan, dtype=np.float32)
        with np.errstate(over="ignore"):
            values[word][rows_at, at] = np.concatenate(column)
    return TrendTable(kind, rank, list(names), steps, values, present)


@dataclass(frozen=True)
class _Block:
    """Rows of one file. rows: the number of the tensor of each. lines: of the file that were read."""

    rows: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: dict[str, NDArray[np.float64]]
    lines: int


def _blocks(
    file: Path,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    wanted: Sequence[str],
    names: dict[str, int],
) -> list[_Block]:
    """Return a block for each part of the tensors: "" or, in old files of msProbe, input and output."""
    name, stage, micro, parts = _columns(file, head, wanted)
    at = head.index("step")
    try:
        whole = (
            rows
            if all(len(row) == len(head) for row in rows)
            else [row for row in rows if len(row) == len(head)]
        )
        columns: Sequence[Sequence[Any]] = list(zip(*whole, strict=True))
        numbers = (
            {place: _numbers(columns[place]) for part in parts.values() for place in part.values()}
            if whole
            else {}
        )
        steps = np.fromiter(map(int, columns[at]), np.int64, len(whole)) if whole else np.empty(0, np.int64)
    except (ValueError, TypeError, OverflowError):
        return _blocks(file, head, [row for row in rows if _is_whole(row, head, at, parts)], wanted, names)
    if not whole:
        return []
    labels = list(columns[name])
    for place, sign in ((micro, ":micro{}"), (stage, "{}:")):
        if place is not None and any(str(value) not in ("0", "") for value in set(columns[place])):
            added = [sign.format(value) if str(value) not in ("0", "") else "" for value in columns[place]]
            labels = [
                label + one if place == micro else one + label
                for label, one in zip(labels, added, strict=True)
            ]
    found = []
    for part, places in parts.items():
        rows_of = [names.setdefault(f"{label}.{part}" if part else label, len(names)) for label in labels]
        values = {word: numbers[place] for word, place in places.items()}
        found.append(_Block(np.array(rows_of), steps, values, len(whole)))
    return found


def _numbers(column: Sequence[Any]) -> NDArray[np.float64]:
    return np.fromiter(map(float, column), np.float64, len(column))


def _is_whole(
    row: Sequence[Any], head: Sequence[str], at: int, parts: Mapping[str, Mapping[str, int]]
) -> bool:
    """Whether every number of a row is one."""
    try:
        return (
            len(row) == len(head)
            and abs(int(row[at])) <= LARGEST_STEP
            and all(
                isinstance(float(row[place]), float) for part in parts.values() for place in part.values()
            )
        )
    except (ValueError, TypeError, OverflowError):
        return False


def _columns(
    file: Path, head: Sequence[str], wanted: Sequence[str]
) -> tuple[int, int | None, int | None, dict[str, dict[str, int]]]:
    """Return the places of name, stage, micro step and statistics (part of the tensor -> statistic -> place)."""
    name = next((head.index(one) for one in NAMES if one in head), None)
    parts: dict[str, dict[str, int]] = {}
    for place, column in enumerate(head):
        part, _, word = column.rpartition(".")
        word = ALIASES.get(word, word)
        if word in STATISTICS and (not wanted or word in wanted):
            parts.setdefault(part, {})[word] = place
    if name is None or "step" not in head or not parts:
        raise NumericsError(
            f"{file} has the columns {', '.join(head)[:120]!r}; fix: name, step and one of {', '.join(STATISTICS)}"
        )
    stage, micro = (head.index(one) if one in head else None for one in ("vpp_stage", "micro_step"))
    return name, stage, micro, parts


def _rows(file: Path) -> tuple[list[str], list[Sequence[Any]]]:
    """Return the names of the columns and the rows. What follows the last line break is torn."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        rows: list[Sequence[Any]] = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    except (OSError, csv.Error) as error:
        raise NumericsError(f"{file} cannot be read: {error}; fix: check the file") from error
    return [str(name) for name in rows[0]] if rows else [], rows[1:]
