"""The tables of a monitor: the contract between the monitor and everything that reads its files.

    <run>/monitor/rank<r>/<kind>_<first>-<last>.csv      rows of the steps first .. last, both included

Kinds and columns are msProbe's, as far as it has them (MindStudio-Probe, monitor: CSV_HEADER and the prefixes of its
writer). Every file begins with a header. One row is one tensor in one step:

    vpp_stage,name,step,norm,mean,min,max,std,zeros,nan,inf      every kind but those below
    vpp_stage,name,step,ratio                                    update_ratio
    vpp_stage,name,step,entropy,logit_max                        attention
    vpp_stage,name,step,rate,expected,scheduled                  learning_rate

    kind            name                                         content
    grad_before     <parameter>                                  gradients that are there when backward begins
    data            input.<i>                                    inputs of the model, over all micro-batches
    actv            <module>.input.<i>, <module>.output.<i>      values of forward, over all micro-batches of the step
    actv_grad       <module>.input_grad.<i>, .output_grad.<i>    gradients of these
    grad_unreduced  <parameter>                                  this rank's sum over its micro-batches
    grad_reduced    <parameter>                                  the sum over all ranks, before clipping
    grad_clipped    <parameter>                                  what the optimizer receives
    learning_rate   group<i>                                     rate; what the schedule says; steps of the scheduler
    param           <parameter>                                  weights after the update
    exp_avg, exp_avg_sq   <parameter>                            Adam's moments after the update
    update_ratio    <parameter>                                  norm of the update / norm of the weights before
    attention       <module>.sdpa.<i>                            call i of scaled_dot_product_attention in the module

vpp_stage is 0: models of one pipeline stage. step counts from 1 in this trainer, as `iteration` in metrics.jsonl does.
norm is the Euclidean norm, std is of the population, zeros is the fraction of elements that equal 0, nan and inf are
counts. The update ratio of weights that are zero, as of new
biases, is inf. mean, min, max, std and norm are nan where an element is nan. entropy is the mean over heads and
queries, in nats; logit_max is the largest scaled score that the mask admits. Only ranks with a difference write
grad_unreduced: a run of one rank has no reduction.

A step is absent where its kind was not monitored in it, so rows are not evenly spaced. The last line of a killed run
may be torn; `read_table` leaves it out. Rows are in the order of the steps, and a step has a name at most once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from numerics.dump_files import replacing, writing
from numerics.errors import NumericsError

KEYS = ("vpp_stage", "name", "step")
STATISTICS = ("norm", "mean", "min", "max", "std", "zeros", "nan", "inf")
GRADIENTS = ("grad_unreduced", "grad_reduced", "grad_clipped")
MOMENTS = ("exp_avg", "exp_avg_sq")
# in the order in which a step computes them
KINDS: Mapping[str, tuple[str, ...]] = {
    "grad_before": STATISTICS,
    "data": STATISTICS,
    "actv": STATISTICS,
    "attention": ("entropy", "logit_max"),
    "actv_grad": STATISTICS,
    **dict.fromkeys(GRADIENTS, STATISTICS),
    "learning_rate": ("rate", "expected", "scheduled"),
    "update_ratio": ("ratio",),
    **dict.fromkeys(MOMENTS, STATISTICS),
    "param": STATISTICS,
}
# msProbe's names of columns and of the first column -> these
ALIASES = {"module_name": "name", "param_name": "name", "nans": "nan"}
COLUMNS = {*KEYS, *(column for columns in KINDS.values() for column in columns)}
FILE = re.compile(r"(?P<kind>[a-z_]+)_(?P<first>[0-9]+)-(?P<last>[0-9]+)\.csv")
RANK = re.compile(r"(?:[\w-]{0,20}-)?rank(\d{1,6})(?:-.*)?")  # msProbe: <time>-rank<r>-<number>
STEPS_PER_FILE = 1000
# of a rank: {"replicas": the ranks with the same weights, "sharded": the parameters of which it has a part}
LAYOUT = "layout.json"
LARGEST_STEP = 10**15
FIX = "free space on the disk, or choose another folder"


class TensorRow(NamedTuple):
    """One tensor in one step. values: of the columns of its table."""

    name: str
    step: int
    values: tuple[float, ...]


class StatisticsTable(NamedTuple):
    """All rows of a kind and a rank. columns: of the values. damaged: lines that were left out."""

    kind: str
    columns: tuple[str, ...]
    rows: tuple[TensorRow, ...]
    damaged: int = 0


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
            if FILE.fullmatch(path.name) is None:
                continue
            with writing(path, FIX):
                head, *lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
                read = _reader(path, head)
                kept = [line for line in lines[:-1] if (row := read(line)) and row.step <= last]
                if not kept:
                    path.unlink()
                elif lines != [*kept, ""]:
                    with replacing(path) as temporary:
                        temporary.write_text("\n".join([head, *kept]) + "\n", encoding="utf-8")


def read_file(path: Path) -> StatisticsTable:
    """Read one file. Torn and damaged lines are left out. NumericsError where it is not a monitor table."""
    match = FILE.fullmatch(path.name)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check the path") from error
    head, *lines = text.split("\n")
    if not lines:  # the process was killed at its first line
        return StatisticsTable(match["kind"] if match else "", (), ())
    read = _reader(path, head)
    rows = [read(line) for line in lines[:-1]]  # what follows the last line break is torn, or empty
    whole = tuple(row for row in rows if row is not None)
    return StatisticsTable(match["kind"] if match else "", _columns(head), whole, len(rows) - len(whole))


def table_files(folder: Path) -> dict[str, list[Path]]:
    """Return kind -> its files in the folder of a rank, in the order of their steps."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.csv"):
        if match := FILE.fullmatch(path.name):
            found.setdefault(match["kind"], []).append((int(match["first"]), path))
    return {kind: [path for _, path in sorted(files)] for kind, files in sorted(found.items())}


def read_table(folder: Path, kind: str) -> StatisticsTable:
    """Read all rows of a kind from the folder of a rank. A kind without files has no rows."""
    tables = [read_file(path) for path in table_files(folder).get(kind, [])]
    tables = [table for table in tables if table.columns]
    columns = tables[0].columns if tables else KINDS.get(kind, ())
    if any(table.columns != columns for table in tables):
        raise NumericsError(f"{folder} has files of {kind} with different columns; fix: separate them")
    rows = tuple(row for table in tables for row in table.rows)
    return StatisticsTable(kind, columns, rows, sum(table.damaged for table in tables))


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


def _reader(path: Path, head: str) -> Callable[[str], TensorRow | None]:
    """Return the function from a line to its row; None for a damaged one.

    A micro step and a virtual pipeline stage, which msProbe writes, are parts of the name where they are not 0.
    """
    names = [ALIASES.get(name, name) for name in head.split(",")]
    places = {name: names.index(name) for name in (*KEYS, "micro_step") if name in names}
    values = [place for place, name in enumerate(names) if name in COLUMNS and name not in KEYS]
    if FILE.fullmatch(path.name) is None or not {"name", "step"} <= places.keys() or not values:
        raise NumericsError(f"{path} is not a monitor table: its header is {head[:60]!r}; fix: move it away")
    name_at, step_at = places["name"], places["step"]
    micro, stage = places.get("micro_step"), places.get("vpp_stage")

    def read(line: str) -> TensorRow | None:
        fields = line.split(",")
        if len(fields) != len(names):
            return None
        name = fields[name_at]
        if micro is not None and fields[micro] not in ("0", ""):
            name = f"{name}:micro{fields[micro]}"
        if stage is not None and fields[stage] not in ("0", ""):
            name = f"{fields[stage]}:{name}"
        try:
            step = int(fields[step_at])
            found = TensorRow(name, step, tuple([float(fields[place]) for place in values]))
        except ValueError:
            return None
        return found if abs(step) <= LARGEST_STEP else None

    return read
