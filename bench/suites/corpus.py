"""Measure the preparation of data, for a corpus and for one four times as large: `make bench SUITE=corpus`."""

from __future__ import annotations

import json
import random
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.suite import Session, Suite, SuiteResult
from bench.tables import Columns, ResultTable, mebibytes
from bench.workers import Worker
from gpt2.config.config import DataConfig
from gpt2.data import dataset
from gpt2.data.sources import embedded_files
from gpt2.hardware.cpu import allowed_cpus
from gpt2.system.errors import UserError

MEGABYTES = 16
FACTOR = 4
FILE_BYTES = 250_000
GOAL = 1.5e6  # tokens a second on two cores
STATUS = Path("/proc/self/status")
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes


def run(session: Session) -> SuiteResult:
    """Write texts to a temporary folder and prepare each corpus in a new worker."""
    if session.shape and not (session.shape.isdecimal() and int(session.shape)):
        raise UserError(f"SHAPE={session.shape} is not a number of megabytes; fix: SHAPE={MEGABYTES}")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), 1_000_000 * int(session.shape or MEGABYTES))
    return SuiteResult({"rows": rows}, (table(rows),))


def measure(folder: Path, size: int) -> list[dict[str, Any]]:
    """Prepare corpora of `size` and FACTOR times as many bytes, as many .txt files and as one .jsonl file."""
    rows = []
    for lines in (False, True):
        for times in (1, FACTOR):
            texts, into = folder / f"texts-{lines}-{times}", folder / f"prepared-{lines}-{times}"
            written = write_texts(texts, size * times, lines)
            with Worker(f"preparing {texts}") as worker:
                found = worker.call(prepare_corpus, texts, into)
            rows.append(found | {"bytes": written, "source": "one .jsonl" if lines else "many .txt"})
    return rows


def write_texts(folder: Path, size: int, lines: bool) -> int:
    """Write documents of shuffled lines of the embedded text, `size` bytes in all. Returns the bytes written."""
    draw = random.Random(size)
    known = [line for path in embedded_files()[:40] for line in path.read_text(errors="replace").splitlines()]
    folder.mkdir(parents=True)
    each = min(FILE_BYTES, size // 400)  # small enough that some documents become validation text
    written = 0
    while written < size:
        document = "\n".join(draw.choices(known, k=each // 32))
        if lines:
            with (folder / "all.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"text": document}) + "\n")
        else:
            (folder / f"{written:012d}.txt").write_text(document, encoding="utf-8")
        written += len(document.encode())
    return written


def prepare_corpus(texts: Path, into: Path) -> dict[str, Any]:
    """Prepare a corpus in this process and its pool, one process a core.

    parent_bytes: peak of this process. worker_bytes: peak of the largest process that it started.
    """
    config = DataConfig("files", (str(texts / "*"),), 0, into, 0)
    began = time.perf_counter()
    directory = dataset.prepare(config, report=lambda line: None)
    seconds = time.perf_counter() - began
    manifest = dataset.verify(directory)
    tokens = sum(manifest.splits[split].tokens for split in dataset.SPLITS)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "parent_bytes": peak_of_this_process(),
        "worker_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * RSS_UNIT,
        "workers": len(allowed_cpus()),
    }


def peak_of_this_process() -> int:
    """Return the high-water mark since this process started. ru_maxrss would include its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


COLUMNS: Columns = {
    "source": lambda row: row["source"],
    "MB": lambda row: f"{row['bytes'] / 1e6:.0f}",
    "M tokens": lambda row: f"{row['tokens'] / 1e6:.1f}",
    "M tokens/s": lambda row: f"{row['tokens_per_second'] / 1e6:.2f}",
    "parent MiB": lambda row: mebibytes(row["parent_bytes"]),
    "largest worker MiB": lambda row: mebibytes(row["worker_bytes"]),
}


def table(rows: list[dict[str, Any]]) -> ResultTable:
    title = f"preparing a corpus on {rows[0]['workers']} cores (goal: {GOAL / 1e6:g} M tokens/s)"
    notes = (
        "The text repeats known lines, which raises tokens/s. Memory does not depend on that.",
        "-: too little text for a pool of workers.",
    )
    return ResultTable.of(title, COLUMNS, rows, notes)


SUITE = Suite(
    "corpus",
    "tokens/s and peak memory of preparing data",
    run,
    shape=f"megabytes of the smaller corpus, {MEGABYTES} by default",
)
