"""What the seed documents ask for: the commands of tests/pins/seed_demands.tsv, in one small finished study.

A row: a demand, a line of shell that is run before it once (for all rows with that line), a command, its exit status,
and a value: a text of its output, or `file: path=value` for a value of a JSON file.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.checkout import link_project
from tests.faults.harness import TABLE, Bench, Fault, outcome
from tests.faults.in_process import train
from tests.faults.workplace import PATIENCE_SECONDS, ROOT, Workplace

DEMANDS = ROOT / "tests/pins/seed_demands.tsv"
SETTINGS = {
    "VARIANTS": "B RAEARLY RALATE RAALL RALEARN B+AQN=mild",
    "SEEDS": "2",
    "GPT2_MAX_ITERS": "12",
    "EVAL_INTERVAL_TOKENS": "192",
    "HELLASWAG": "y",
    "HELLASWAG_FILE": str(Bench.hellaswag),
    "MONITOR": "y",
    "MONITOR_INTERVAL": "4",
}


def expected(row: Mapping[str, str]) -> str:
    return f"exit {row['exit']}, {row['value']}"


@functools.cache
def finished_study(bench: Bench) -> Workplace:
    place = bench.workplace(**SETTINGS)
    elsewhere = place.folder / "elsewhere"  # a second folder with the project, for other configurations
    elsewhere.mkdir()
    link_project(elsewhere)
    for folder, name in itertools.product((place.folder, elsewhere), ("Makefile", "tests")):
        (folder / name).symlink_to(ROOT / name)
    done = train(place)
    assert done.returncode == 0, done.stdout
    return place


@functools.cache
def run(bench: Bench, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in the folder of the study, once. `make` and `python` use this interpreter."""
    place = finished_study(bench)
    here = f'"{sys.executable}" "$@"'
    words = f"python() {{ {here}; }}; make() {{ command make PYTHON={here}; }}; {line}"
    return subprocess.run(
        ["bash", "-c", words], cwd=place.folder, env=place.environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", timeout=2 * PATIENCE_SECONDS,
    )  # fmt: skip


def holds(folder: Path, value: str, output: str) -> bool:
    """Return whether the output has the text, or the JSON file the value."""
    name, colon, rest = value.partition(": ")
    if not (colon and name.endswith(".json")):
        return value in output
    path, _, wanted = rest.rpartition("=")
    found: Any = json.loads((folder / name).read_text())
    for key in path.split("/"):
        found = found[int(key) if isinstance(found, list) else key]
    return (found if isinstance(found, str) else json.dumps(found)) == wanted


def meet(row: Mapping[str, str], bench: Bench) -> str:
    """Run the command of a row. Returns what is expected, or its output."""
    before = run(bench, row["before"] or "true")
    done = run(bench, row["command"])
    met = done.returncode == int(row["exit"]) and holds(
        finished_study(bench).folder, row["value"], done.stdout
    )
    failed = before.stdout[-300:] if before.returncode else ""
    return outcome(met, expected(row), f"{failed} exit {done.returncode}, {done.stdout[-600:]}")


def rows() -> list[dict[str, str]]:
    with DEMANDS.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


TABLE += [
    Fault(f"seed: {row['demand']}", expected(row), functools.partial(meet, row), False) for row in rows()
]
