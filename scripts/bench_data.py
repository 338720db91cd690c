"""`make bench CORPUS=1`: tokens/s and peak memory of preparing a corpus, for one of N MB and one of four times that.

python -m scripts.bench_data [--megabytes 16]                writes made-up text files in a temporary folder, measures
python -m scripts.bench_data --prepare TEXTS --into FOLDER   prepares one corpus in this process; prints JSON
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.runner import BenchError
from bench.suites.growth import columns
from gpt2.config.config import DataConfig
from gpt2.data import dataset
from gpt2.data.sources import embedded_files
from gpt2.system.errors import run_command

TIMES = 4
FILE_BYTES = 250_000
GOAL = 1.5e6  # tokens a second on two cores
STATUS = Path("/proc/self/status")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench CORPUS=1")
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--prepare", default="")
    parser.add_argument("--into", default="")
    arguments = parser.parse_args()
    if arguments.prepare:
        print(json.dumps(prepare(Path(arguments.prepare), Path(arguments.into))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(text(measure(Path(folder), 1_000_000 * arguments.megabytes)))
    return 0


def measure(folder: Path, size: int) -> list[dict[str, Any]]:
    """Corpora of `size` and TIMES that many bytes, as many files and as one file of lines of JSON."""
    rows = []
    for lines in (False, True):
        for times in (1, TIMES):
            texts, into = folder / f"texts-{lines}-{times}", folder / f"prepared-{lines}-{times}"
            written = write_texts(texts, size * times, lines)
            seen = in_a_process(texts, into)
            rows.append(seen | {"bytes": written, "source": "one .jsonl" if lines else "many .txt"})
    return rows


def write_texts(folder: Path, size: int, lines: bool) -> int:
    """Documents of FILE_BYTES each, `size` bytes together: shuffled lines of the embedded text. Returns the bytes."""
    draw = random.Random(size)
    known = [line for path in embedded_files()[:40] for line in path.read_text(errors="replace").splitlines()]
    folder.mkdir(parents=True)
    each = min(FILE_BYTES, size // 400)  # so many that some fall to validation
    written = 0
    with (folder / "all.jsonl").open("w", encoding="utf-8") if lines else open(os.devnull, "w") as together:
        while written < size:
            document = "\n".join(draw.choices(known, k=each // 32))
            if lines:
                together.write(json.dumps({"text": document}) + "\n")
            else:
                (folder / f"{written:012d}.txt").write_text(document, encoding="utf-8")
            written += len(document.encode())
    return written


def in_a_process(texts: Path, into: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_data", "--prepare", str(texts), "--into", str(into)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BenchError(f"preparing {texts}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(texts: Path, into: Path) -> dict[str, Any]:
    """Prepare in this process and its workers, one a core.

    Peaks in bytes: parent_bytes of this process (its high-water mark, not counting what started it), worker_bytes of
    the largest process that it started (RUSAGE_CHILDREN).
    """
    config = DataConfig("files", (str(texts / "*"),), 0, into, 0)
    began = time.perf_counter()
    directory = dataset.prepare(config, report=lambda line: None)
    seconds = time.perf_counter() - began
    manifest = dataset.verify(directory)
    tokens = sum(manifest["splits"][split]["tokens"] for split in dataset.SPLITS)
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "parent_bytes": own_peak(unit),
        "worker_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit,
        "workers": len(os.sched_getaffinity(0)),
    }


def own_peak(unit: int) -> int:
    """High-water mark of this process since it was started; ru_maxrss would also know of its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found.group(1)) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def text(rows: list[dict[str, Any]]) -> str:
    """The rows, and how the peaks of the large corpus compare with those of the small one."""
    head = ("source", "MB", "M tokens", "M tokens/s", "parent MiB", "largest worker MiB")
    cells = [
        (
            row["source"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['tokens'] / 1e6:.1f}",
            f"{row['tokens_per_second'] / 1e6:.2f}",
            f"{row['parent_bytes'] / 2**20:.0f}",
            f"{row['worker_bytes'] / 2**20:.0f}" if row["worker_bytes"] else "-",
        )
        for row in rows
    ]
    said = [f"preparing a corpus on {rows[0]['workers']} cores (goal: {GOAL / 1e6:g} M tokens/s)"]
    said.append(columns([head, *cells]))
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        more = [f"{name} {factor(small, large, key)}" for name, key in
                (("parent", "parent_bytes"), ("worker", "worker_bytes"))]  # fmt: skip
        size = large["bytes"] / small["bytes"]
        said.append(f"{small['source']}: {size:.1f} times the text takes times the memory: {', '.join(more)}")
    said.append("The text repeats known lines, which flatters tokens/s; the memory does not depend on that.")
    return "\n".join(said)


def factor(small: dict[str, Any], large: dict[str, Any], key: str) -> str:
    return f"{large[key] / small[key]:.2f}" if small[key] else "- (too little text for workers)"


if __name__ == "__main__":
    run_command(main)
