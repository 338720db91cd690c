"""msProbe's `compare` on the same records, where the command `msprobe` is on the path (mindstudio-probe 26.2 on PyPI).

msProbe compares value by value and gives each row a result. The first row that does not pass is taken for its answer.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.numerics.faults import PlantedFault
from bench.numerics.models import PATHS
from gpt2.system.errors import UserError

CALL = re.compile(r"(.+?\.(?:forward|backward)(?:\.\d+)?)\.(?:input|output|kwargs|parameters)")
MODULE = re.compile(r"Module\.(.*)\.[^.]+\.(?:forward|backward)(?:\.\d+)?")
PATIENCE_SECONDS = 300


class RefusedError(UserError):
    """msProbe wrote no table, as for records of statistics against records of values."""


def program() -> str | None:
    """Return the path of the command; None where it is not installed."""
    return shutil.which("msprobe")


def first_flagged(target: Path, golden: Path) -> str | None:
    """Compare step by step. Returns the first row that does not pass as "module: row"; None if every row passes."""
    for step in sorted(target.glob("step*"), key=lambda path: int(path.name.removeprefix("step"))):
        dumps = [side / step.name / "rank0" / "dump.json" for side in (target, golden)]
        parents = json.loads((dumps[0].parent / "construct.json").read_text(encoding="utf-8"))
        for row in _rows(*dumps):
            if row["Result"] != "pass":
                return f"{_module(row['NPU Name'], parents)}: {row['NPU Name']}"
    return None


def names(fault: PlantedFault, kind: str, flagged: str) -> bool:
    """Return whether the flagged row is in the expected part of the model."""
    module, _, row = flagged.partition(": ")
    paths = [PATHS[kind][name] for name in fault.expected.split("|")] if fault.expected else []
    return module in paths and f".{fault.direction}" in row


def _rows(target: Path, golden: Path) -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [program() or "msprobe", "compare", "-tp", str(target), "-gp", str(golden), "-o", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        tables = list(Path(folder).glob("compare_result*.csv"))
        if len(tables) != 1:
            raise RefusedError(f"msprobe compare wrote no table: {(done.stdout + done.stderr)[-200:]!r}")
        with tables[0].open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file)


def _module(row: str, parents: dict[str, object]) -> str:
    """Return the path of the module that a row belongs to: its own, or that of the module around a function."""
    found = CALL.match(row)
    name: object = found[1] if found else row
    for _ in range(len(parents)):
        module = MODULE.fullmatch(str(name))
        if module:
            return module[1]
        parent = parents.get(str(name))
        name = parent[0] if isinstance(parent, list) and parent else parent
    return ""
