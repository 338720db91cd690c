"""Write the monitor's tables, and read them as arrays, tensors by steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from referee.errors import NumericsError
from referee.numerics.monitor.targets import KEYS, KINDS, STATISTICS, STEPS_PER_FILE
from referee.numerics.text_files import replacing, writing

# msProbe's names of columns and of the first column -> these
ALIASES = {"module_name": "name", "param_name": "name", "nans": "nan"}
COLUMNS = {*KEYS, *(column for columns in KINDS.values() for column in columns)}
FILE = re.compile(r"(?P<kind>[a-z_]+)_(?P<first>[0-9]+)-(?P<last>[0-9]+)\.csv")
RANK = re.compile(r"(?:[\w-]{0,20}-)?rank(\d{1,6})(?:-.*)?")  # msProbe: <time>-rank<r>-<number>
# of a rank: {"replicas": the ranks with the same weights, "sharded": the parameters of which it has a part}
LAYOUT = "layout.json"
FIX = "free space on the disk, or choose another folder"


Floats = NDArray[np.float64]
TableRow = tuple[str, int, list[float]]  # name, step, values


@dataclass
class TensorSeries:
    """One kind of a rank as arrays.

    values: statistic -> (tensors, steps), NaN also where there is no row. present: (tensors, steps), where one is.
    """

    kind: str
    rank: int
    names: list[str]
    steps: NDArray[np.int64]
    values: dict[str, Floats]
    present: NDArray[np.bool_]

    def cut(self, names: Sequence[str], steps: NDArray[np.int64]) -> TensorSeries:
        """Return the part with these names and steps, which it has, in their order."""
        rows = {name: row for row, name in enumerate(self.names)}
        at = np.ix_(
            np.array([rows[name] for name in names], dtype=np.int64), np.searchsorted(self.steps, steps)
        )
        values = {column: numbers[at] for column, numbers in self.values.items()}
        return TensorSeries(self.kind, self.rank, list(names), steps, values, self.present[at])


class TableWriter:
    """Append the rows of one rank. A file is opened for each step, so a killed process leaves whole lines.

    statistics: the columns of tensors, some of STATISTICS. Values have 9 digits, which hold any float32.
    """

    def __init__(
        self,
        folder: Path,
        steps_per_file: int = STEPS_PER_FILE,
        statistics: tuple[str, ...] = STATISTICS,
    ) -> None:
        self.folder, self.steps_per_file = folder, steps_per_file
        self.columns = {
            kind: statistics if columns == STATISTICS else columns for kind, columns in KINDS.items()
        }

    def write(self, kind: str, step: int, rows: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Append (name, values) of one step. NumericsError names a file that cannot be written."""
        first = step // self.steps_per_file * self.steps_per_file
        path = self.folder / f"{kind}_{first}-{first + self.steps_per_file - 1}.csv"
        lines = [
            ",".join(("0", _quoted(name), str(step), *(f"{value:.9g}" for value in values)))
            for name, values in rows
        ]
        if not lines:
            return
        with writing(path, FIX):
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", newline="") as file:
                if file.tell() == 0:
                    lines.insert(0, ",".join((*KEYS, *self.columns[kind])))
                file.write("\n".join(lines) + "\n")

    def truncate(self, last: int) -> None:
        """Drop the rows after step `last`, which a resumed run writes again, and torn lines."""
        for path in [path for paths in table_files(self.folder).values() for path in paths]:
            with writing(path, FIX):
                head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
                read = _reader(path, head)
                kept = [line for line in lines[:-1] if (row := read(line)) and row[1] <= last]
                if not kept:
                    path.unlink()
                elif lines != [*kept, ""]:
                    with replacing(path) as temporary:
                        temporary.write_text("\n".join([head, *kept]) + "\n", encoding="utf-8")


def table_files(folder: Path) -> dict[str, list[Path]]:
    """Return kind -> its files in the folder of a rank, in the order of their steps."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.csv"):
        if match := FILE.fullmatch(path.name):
            found.setdefault(match["kind"], []).append((int(match["first"]), path))
    return {kind: [path for _, path in sorted(files)] for kind, files in sorted(found.items())}


def read_series(folder: Path, kind: str, rank: int = 0) -> TensorSeries | None:
    """Read all rows of a kind from the folder of a rank; torn and damaged lines are left out. None without a row.

    Of a step that was written twice the last row counts. NumericsError where a file is not a monitor table.
    """
    columns: tuple[str, ...] = ()
    rows: dict[tuple[str, int], list[float]] = {}
    for path in table_files(folder).get(kind, []):
        try:
            head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError as error:
            raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check the path") from error
        if not lines:  # the process was killed at its first line
            continue
        if rows and columns != _columns(head):
            raise NumericsError(f"{path} has other columns than the files before; fix: separate them")
        columns = _columns(head)
        read = map(_reader(path, head), lines[:-1])  # what follows the last line break is torn, or empty
        rows |= {row[:2]: row[2] for row in read if row}
    if not rows:
        return None
    places = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in rows))}
    steps, at = np.unique([step for _, step in rows], return_inverse=True)
    where = [places[name] for name, _ in rows], at
    present = np.zeros((len(places), len(steps)), dtype=bool)
    present[where] = True
    values = np.full((len(columns), *present.shape), np.nan)
    values[:, *where] = np.array(list(rows.values())).T
    return TensorSeries(kind, rank, [*places], steps, dict(zip(columns, values, strict=True)), present)


@dataclass
class MonitorTables:
    """The tables of a run by kind and rank, and the folders of its ranks."""

    folders: dict[int, Path]
    tables: dict[tuple[str, int], TensorSeries]

    @property
    def ranks(self) -> list[int]:
        return list(self.folders)

    def of(self, kind: str) -> list[TensorSeries]:
        """Return the tables of a kind, in the order of the ranks."""
        return [table for (one, _), table in sorted(self.tables.items()) if one == kind]


def read_tables(path: Path) -> MonitorTables:
    """Read all tables of a run's folder, of its monitor's folder, or of that of one rank."""
    folders = rank_folders(path / "monitor" if (path / "monitor").is_dir() else path)
    tables = {
        (kind, rank): table
        for rank, folder in folders.items()
        for kind in table_files(folder)
        if (table := read_series(folder, kind, rank))
    }
    return MonitorTables(folders, tables)


def aligned(*series: TensorSeries) -> list[TensorSeries]:
    """Return the parts with the names and steps that all have, in the order of the first."""
    shared = set.intersection(*(set(one.names) for one in series))
    names = [name for name in series[0].names if name in shared]
    steps = reduce(np.intersect1d, [one.steps for one in series])
    return [one.cut(names, steps) for one in series]


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return rank -> its folder, of <run>/monitor; of several folders of a rank, the last one by name.

    A folder with tables itself is that of the rank in its name, or of rank 0.
    """
    folders = sorted(path for path in folder.glob("*") if path.is_dir())
    found = {int(match[1]): path for path in folders if (match := RANK.fullmatch(path.name))}
    if not found and table_files(folder):
        match = RANK.fullmatch(folder.name)
        found = {int(match[1]) if match else 0: folder}
    return dict(sorted(found.items()))


def _quoted(name: str) -> str:
    """Return the name as one field. Names of modules can hold any character but a dot."""
    return re.sub(r'[,"\r\n]', "_", name)


def _columns(head: str) -> tuple[str, ...]:
    """Return the statistics of a header by the names that they have here."""
    names = (ALIASES.get(name, name) for name in head.split(","))
    return tuple(name for name in names if name in COLUMNS and name not in KEYS)


def _reader(path: Path, head: str) -> Callable[[str], TableRow | None]:
    """Return the function from a line to its row; None for a damaged one."""
    names, columns = [ALIASES.get(name, name) for name in head.split(",")], _columns(head)
    if not columns or not {"name", "step"} <= {*names}:
        raise NumericsError(f"{path} is not a monitor table: its header is {head[:60]!r}; fix: move it away")

    def read(line: str) -> TableRow | None:
        try:
            fields = dict(zip(names, line.split(","), strict=True))
            return _full_name(fields), int(fields["step"]), [float(fields[column]) for column in columns]
        except ValueError:
            return None

    return read


def _full_name(fields: Mapping[str, str]) -> str:
    """Return the name, with the pipeline stage and the micro step that msProbe writes, where they are not 0."""
    stage, micro = fields.get("vpp_stage", "0"), fields.get("micro_step", "0")
    name = fields["name"] if micro in ("0", "") else f"{fields['name']}:micro{micro}"
    return name if stage in ("0", "") else f"{stage}:{name}"
