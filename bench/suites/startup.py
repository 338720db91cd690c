"""Measure the time from the start of a training process to its first optimizer step: `make bench SUITE=startup`."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.first_step import EVENT, HEAVY
from bench.suite import Session, Suite, SuiteResult
from bench.tables import INTERVAL, ResultTable, format_spread, spread
from bench.temporary_studies import configure_study, prepare_study
from bench.workers import BenchError
from gpt2.artifacts import run_record
from gpt2.system.errors import UserError
from study.executors.child_process import Child

GOAL_SECONDS = 20.0
SMOKE, MAIN = "gpt2-ra-ablation-smoke", "gpt2-ra-ablation"
STUDIES: tuple[tuple[str, dict[str, str]], ...] = ((SMOKE, {}), (MAIN, {}), (SMOKE, {"COMPILE": "y"}))
PARTS = ("interpreter", "imports", "settings and data", "model", "opening the run", "first step")


def run(session: Session) -> SuiteResult:
    """Prepare each study in a temporary folder and start it ROUNDS times. Save after every study."""
    starts: dict[str, list[dict[str, Any]]] = {}
    data: dict[str, Any] = {"parts": PARTS, "starts": starts}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, values) in enumerate(STUDIES):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, f"kernels{number}"))  # empty at first
            label = " ".join([name, *(f"CONFIG_{symbol}={value}" for symbol, value in values.items())])
            try:
                starts[label] = measure(Path(folder, str(number)), name, session.rounds, **values)
            except UserError as error:  # such as a missing compiler
                session.say(f"skipped: {label}: {error}")
                continue
            totals = ", ".join(f"{row['total']:.2f}" for row in starts[label])
            session.say(f"{label}: {totals} s")
            session.save(data)
    if not starts:
        raise UserError("no study could be started; the reason for each study is printed above")
    return SuiteResult(data, (table(starts),))


def measure(folder: Path, name: str, rounds: int, **values: str) -> list[dict[str, Any]]:
    """Start a training process `rounds` times.

    Returns a row a start: seconds of each of PARTS, their "total", the "loaded" packages of HEAVY, and "compiles".
    """
    fixed = {"HELLASWAG": "n", "GPT2_MAX_TIME": "0", "GPT2_MAX_ITERS": "20", "DATA_DIR": str(folder / "data")}
    study = configure_study(folder, name, **fixed | values)
    prepare_study(study)
    variant, rows = study.settings.variants[0], []
    for number in range(rounds):
        run_dir = study.directory / "runs" / run_record.run_name(variant, number)
        run_dir.mkdir(parents=True)
        row = start_once([str(study.directory), variant, str(number)], run_dir / "log.txt")
        rows.append(row | {"compiles": study.config.target.compile})
    return rows


def start_once(arguments: list[str], log: Path) -> dict[str, Any]:
    """Start one training process as a study does, which is the subject here, and read its marks."""
    began = time.monotonic()
    child = Child(arguments, log, module="bench.first_step")
    found = [event for event in child.messages() if event["event"] == EVENT]
    status = child.wait()
    if not found:
        raise BenchError(f"no first step, exit status {status}: {child.last_words()}")
    marks = [began, *found[0]["marks"]]
    parts = dict(zip(PARTS, (b - a for a, b in itertools.pairwise(marks)), strict=True))
    return parts | {"total": marks[-1] - began, "loaded": found[0]["loaded"]}


def table(starts: Mapping[str, Sequence[Mapping[str, Any]]]) -> ResultTable:
    """List the median seconds of each part. A first process that compiles kernels is listed in a note."""
    cells, notes = [], []
    for label, rows in starts.items():
        if rows[0]["compiles"] and len(rows) > 1:
            first = f"{rows[0]['total']:.2f} s"
            notes.append(f"{label}: the first process compiled the kernels; its first step came at {first}")
            rows = rows[1:]
        medians = [f"{median(row[part] for row in rows):.2f}" for part in PARTS]
        cells.append((label, str(len(rows)), format_spread(spread([row["total"] for row in rows])), *medians))
    loaded = sorted({name for rows in starts.values() for row in rows for name in row["loaded"]})
    notes += [
        f"heavy packages loaded: {', '.join(loaded) or 'none'} (of {', '.join(HEAVY)})",
        f"first step: median [{INTERVAL}]; parts: medians. Goal: {GOAL_SECONDS:g} s",
    ]
    head = ("study", "starts", "first step s", *PARTS)
    return ResultTable("seconds from the start of a training process", head, tuple(cells), tuple(notes))


SUITE = Suite(
    "startup",
    "seconds from the start of a training process to its first step, by part",
    run,
    rounds={"cpu": 5, "card": 5},
)
