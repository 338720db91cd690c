"""Read the files of a monitor row by row, by the csv module alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from referee.numerics.monitor.monitor_tables import table_files


class Row(NamedTuple):
    name: str
    step: int
    values: tuple[float, ...]


def read_rows(folder: Path, kind: str) -> list[Row]:
    """Return every row of a kind, in the order of the files."""
    lines = [
        line
        for path in table_files(folder).get(kind, [])
        for line in list(csv.reader(path.read_text().splitlines()))[1:]
        if len(line) > 3  # of a killed run the last one may be torn
    ]
    return [Row(name, int(step), tuple(map(float, values))) for _, name, step, *values in lines]
