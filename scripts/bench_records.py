"""What a study of many recorded runs costs `make` before its next run, and `make report`; on synthetic records.

python -m scripts.bench_records [--count 1000] [--steps 1000]    prints the table and, as its last line, JSON
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import synthetic_records as synthetic
from bench.runner import BenchError
from bench.suites.growth import columns
from gpt2.system import files
from gpt2.system.errors import run_command
from study.report import build
from study.report.markdown import markdown
from study.report.page import document
from study.runner.study import Study

VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
GOAL_SECONDS, GOAL_RUNS = 5.0, 1000


class NextRunError(Exception):
    """The study has come to where it would start its next run."""


class UpToTheNextRun(Study):
    """A study that stops where its next training process would be started."""

    def one(self, run: tuple[str, int], plan: dict[str, Any], terminal: Any) -> None:
        raise NextRunError


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.bench_records")
    parser.add_argument("--count", type=int, default=GOAL_RUNS)
    parser.add_argument("--steps", type=int, default=1000, help="lines of each run's metrics.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = measure(Path(folder), max(1, arguments.count // len(VARIANTS)), arguments.steps)
    print(text(seen))
    print(json.dumps(seen))
    return 0


def measure(folder: Path, seeds: int, steps: int) -> dict[str, Any]:
    """Seconds of each part; the last seed's runs are still to do, so that `make` has something to plan."""
    from bench.temporary_studies import prepare, study_in

    study = study_in(
        folder,
        "gpt2-ra-ablation-smoke",
        VARIANTS=" ".join(VARIANTS),
        SEEDS=str(seeds + 1),
        HELLASWAG="n",
        DATA_DIR=str(folder / "data"),
    )
    with contextlib.redirect_stdout(sys.stderr):
        prepare(study)
    runs = synthetic.write_runs(study.directory, VARIANTS, seeds, steps)
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = work()
        parts[name] = time.perf_counter() - began
        return value

    with contextlib.redirect_stdout(sys.stderr):
        timed("make, to the start of its next run", lambda: next_run(study))
    built = timed("report: numbers", lambda: build.build_report(study.directory))
    timed("report.json", lambda: files.finite(build.as_json(built)))
    timed("report.md", lambda: markdown(built))
    timed("report.html", lambda: document(built, study.directory))
    timed("make report, as a command", lambda: command(study.directory))
    bytes_ = sum(path.stat().st_size for path in (study.directory / "runs").rglob("*") if path.is_file())
    return {"runs": runs, "lines_a_run": steps, "bytes": bytes_, "used": len(built.rows), "seconds": parts}


def next_run(study: Study) -> None:
    """All that `make` does in its process up to the next training process."""
    stopping = UpToTheNextRun(study.symbols, study.config_text)
    with contextlib.suppress(NextRunError):
        stopping.run()
        raise BenchError("the study came to its end; right: runs that are still to do")


def command(study_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.report", str(study_dir)], capture_output=True, text=True
    )
    if done.returncode:
        raise BenchError(f"make report failed: {done.stderr.strip().splitlines()[-1]}")


def in_a_process(count: int) -> dict[str, Any]:
    """Measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench_records", "--count", str(count)], capture_output=True, text=True
    )
    if done.returncode:
        raise BenchError(f"recorded runs: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def text(seen: dict[str, Any]) -> str:
    """The parts for a reader, and planning and reporting together against the goal."""
    parts = seen["seconds"]
    together = parts["make, to the start of its next run"] + parts["make report, as a command"]
    cells: list[tuple[str, ...]] = [(name, f"{seconds:.2f} s") for name, seconds in parts.items()]
    goal = f" (goal at {GOAL_RUNS:,} runs: {GOAL_SECONDS:g} s)"
    return (
        f"cost by recorded runs: {seen['runs']:,} synthetic records, {seen['lines_a_run']:,} lines of metrics each, "
        f"{seen['bytes'] / 2**20:,.0f} MiB\n{columns(cells)}\nplanning and reporting: {together:.2f} s{goal}"
    )


if __name__ == "__main__":
    run_command(main)
