"""The tables of a monitor: the contract between the monitor and everything that reads its files.

    <run>/monitor/rank<r>/<kind>_<first>-<last>.csv      rows of the steps first .. last, both included

Kinds and columns are msProbe's, as far as it has them (MindStudio-Probe, monitor: CSV_HEADER and the prefixes of its
writer). Every file begins with a header. One row is one tensor in one step:

    vpp_stage,name,step,norm,mean,min,max,std,zeros,nan,inf      every kind but the three below
    vpp_stage,name,step,ratio                                    update_ratio, mg_direction
    vpp_stage,name,step,entropy,logit_max                        attention

    kind            name                                         content
    actv            <module>.input.<i>, <module>.output.<i>      values of forward, over all micro-batches of the step
    actv_grad       <module>.input_grad.<i>, .output_grad.<i>    gradients of these
    grad_unreduced  <parameter>                                  this rank's sum over its micro-batches
    grad_reduced    <parameter>                                  the sum over all ranks, before clipping
    grad_clipped    <parameter>                                  what the optimizer receives
    param           <parameter>                                  weights after the update
    exp_avg, exp_avg_sq   <parameter>                            Adam's moments after the update
    update_ratio    <parameter>                                  norm of the update / norm of the weights before
    mg_direction    <parameter>                                  how far the signs of gradient and exp_avg agree
    attention       <module>.sdpa.<i>                            call i of scaled_dot_product_attention in the module

vpp_stage is 0: models of one pipeline stage. step counts from 1 in this trainer, as `iteration` in metrics.jsonl does.
norm is the Euclidean norm, std is of the population, zeros is the fraction of elements that equal 0, nan and inf are
counts. mg_direction is (mean of sign(gradient) x sign(exp_avg) + 1) / 2 before the update, as msProbe's: 1 where all
signs agree, 0.5 of independent ones; the first step has none. The update ratio of weights that are zero, as of new
biases, is inf. mean, min, max, std and norm are nan where an element
is nan. entropy is the mean over heads and queries, in nats; logit_max is the largest scaled score that the mask
admits. msProbe also splits activations by micro_step; here their rows join all micro-batches, so the column is
absent. Only ranks with a difference write grad_unreduced: a run of one rank has no reduction.

A step is absent where its kind was not monitored in it, so rows are not evenly spaced. The last line of a killed run
may be torn; `read_table` leaves it out. Rows are in the order of the steps, and a step has a name at most once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from numerics.dump_files import replacing, writing
from numerics.errors import NumericsError

KEYS = ("vpp_stage", "name", "step")
STATISTICS = ("norm", "mean", "min", "max", "std", "zeros", "nan", "inf")
GRADIENTS = ("grad_unreduced", "grad_reduced", "grad_clipped")
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS: Mapping[str, tuple[str, ...]] = {
    "actv": STATISTICS,
    "actv_grad": STATISTICS,
    **dict.fromkeys(GRADIENTS, STATISTICS),
    "param": STATISTICS,
    **dict.fromkeys(MOMENTS, STATISTICS),
    "update_ratio": ("ratio",),
    "mg_direction": ("ratio",),
    "attention": ("entropy", "logit_max"),
}
FILE = re.compile(r"(?P<kind>[a-z_]+)_(?P<first>[0-9]+)-(?P<last>[0-9]+)\.csv")
STEPS_PER_FILE = 1000
FIX = "free space on the disk, or choose another folder"

ALL = tuple(kind for kind in KINDS if kind != "mg_direction")  # of the target "all"

Values = tuple[float, ...]


@dataclass(frozen=True)
class TensorRow:
    """One tensor in one step. values: of the columns of its kind."""

    name: str
    step: int
    values: Values
    stage: int = 0


@dataclass(frozen=True)
class StatisticsTable:
    """All rows of a kind and a rank. columns: of the values."""

    kind: str
    columns: tuple[str, ...]
    rows: tuple[TensorRow, ...]


class TableWriter:
    """Append the rows of one rank. A file is opened for each step, so a killed process leaves whole lines.

    columns: kind -> columns, where they differ from KINDS. digits: significant digits of a value.
    """

    def __init__(
        self,
        folder: Path,
        steps_per_file: int = STEPS_PER_FILE,
        columns: Mapping[str, tuple[str, ...]] | None = None,
        digits: int = 9,
    ) -> None:
        self.folder, self.steps_per_file, self.digits = folder, steps_per_file, digits
        self.columns = {**KINDS, **(columns or {})}

    def write(self, kind: str, step: int, rows: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Append (name, values) of one step. NumericsError names a file that cannot be written."""
        first = step // self.steps_per_file * self.steps_per_file
        path = self.folder / f"{kind}_{first}-{first + self.steps_per_file - 1}.csv"
        lines = [
            ",".join(("0", _quoted(name), str(step), *(f"{value:.{self.digits}g}" for value in values)))
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
        for path in sorted(self.folder.glob("*.csv")):
            match = FILE.fullmatch(path.name)
            if match is None or (int(match["last"]) <= last and _is_whole(path)):
                continue
            with writing(path, FIX):
                table = read_file(path)
                kept = [row for row in table.rows if row.step <= last]
                if not kept:
                    path.unlink()
                    continue
                text = path.read_text(encoding="utf-8", errors="replace").splitlines()
                body = [
                    line for line in text[1:] if (row := _parsed(line, table.columns)) and row.step <= last
                ]
                with replacing(path) as temporary:
                    temporary.write_text("\n".join([text[0], *body]) + "\n", encoding="utf-8")


def read_file(path: Path) -> StatisticsTable:
    """Read one file. Torn lines are left out. NumericsError where it is not a monitor table."""
    match = FILE.fullmatch(path.name)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check the path") from error
    head, *lines = text.split("\n")
    columns = tuple(head.split(","))
    if match is None or columns[: len(KEYS)] != KEYS:
        raise NumericsError(f"{path} is not a monitor table: its header is {head[:60]!r}; fix: move it away")
    values = columns[len(KEYS) :]
    whole = lines[:-1]  # what follows the last line break is torn, or empty
    rows = tuple(row for line in whole if (row := _parsed(line, values)) is not None)
    return StatisticsTable(match["kind"], values, rows)


def table_files(folder: Path) -> dict[str, list[Path]]:
    """Return kind -> its files in the folder of a rank, in the order of their steps."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.csv"):
        if match := FILE.fullmatch(path.name):
            found.setdefault(match["kind"], []).append((int(match["first"]), path))
    return {kind: [path for _, path in sorted(files)] for kind, files in sorted(found.items())}


def read_table(folder: Path, kind: str) -> StatisticsTable:
    """Read all rows of a kind from the folder of a rank. A kind without files has no rows."""
    files = table_files(folder).get(kind, [])
    tables = [read_file(path) for path in files]
    columns = tables[0].columns if tables else KINDS.get(kind, ())
    if any(table.columns != columns for table in tables):
        raise NumericsError(f"{folder} has files of {kind} with different columns; fix: separate them")
    return StatisticsTable(kind, columns, tuple(row for table in tables for row in table.rows))


def rank_folders(folder: Path) -> dict[int, Path]:
    """Return rank -> its folder, of <run>/monitor."""
    found = (path for path in folder.glob("rank*") if path.is_dir() and path.name[4:].isdigit())
    return {int(path.name[4:]): path for path in sorted(found, key=lambda path: int(path.name[4:]))}


def _quoted(name: str) -> str:
    """Return the name as one field. Names of modules can hold any character but a dot."""
    return re.sub(r'[,"\r\n]', "_", name)


def _parsed(line: str, columns: Sequence[str]) -> TensorRow | None:
    fields = line.split(",")
    if len(fields) != len(KEYS) + len(columns):
        return None
    try:
        stage, step = int(fields[0]), int(fields[2])
        return TensorRow(fields[1], step, tuple(map(float, fields[3:])), stage)
    except ValueError:
        return None


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) == b"\n"
