"""Measure planning and reporting for a study of many recorded runs: `make bench SUITE=records`."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import synthetic_records
from bench.suite import Options, Session, Suite, SuiteResult
from bench.tables import ResultTable
from bench.temporary_studies import configure_study, prepare_study
from bench.workers import BenchError, call_in_worker, last_message
from gpt2.system import files
from gpt2.system.errors import UserError
from pages.document import render_markdown
from pages.page import render_html
from study.records.plan_file import Plan
from study.report import build
from study.report.document import report_document
from study.runner.study import Study

VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
GOAL_SECONDS, GOAL_RUNS = 5.0, 1000
METRICS_LINES = 1000  # of each run
NEXT_RUN, REPORT = "make, to the start of its next run", "make report, as a command"
MEASURE = "bench.suites.records:measure"


class NextRunError(Exception):
    """The study has reached the start of its next run."""


class StudyUpToNextRun(Study):
    """A study that stops where it would start its next training process."""

    def execute_run(self, run: tuple[str, int], plan: Any, terminal: Any) -> Plan:
        raise NextRunError


def run(options: Options, session: Session) -> SuiteResult:
    """Measure in a new worker, which has loaded no more than `make` has."""
    sizes = re.fullmatch(r"(\d+)(?:x(\d+))?", options.shape or str(GOAL_RUNS))
    if not sizes:
        raise UserError(f"SHAPE={options.shape} is no number of runs; fix: SHAPE=1000 or SHAPE=1000x500")
    runs, lines = int(sizes[1]), int(sizes[2] or METRICS_LINES)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"folder": folder, "seeds": max(1, runs // len(VARIANTS)), "lines": lines}
        data = call_in_worker("recorded runs", MEASURE, arguments)
    return SuiteResult(data, (table(data),))


def measure(folder: str, seeds: int, lines: int) -> dict[str, Any]:
    """Time each part. The runs of the last seed are missing, so that `make` has something to plan."""
    study = configure_study(
        Path(folder),
        "gpt2-ra-ablation-smoke",
        VARIANTS=" ".join(VARIANTS),
        SEEDS=str(seeds + 1),
        HELLASWAG="n",
        DATA_DIR=str(Path(folder, "data")),
    )
    with contextlib.redirect_stdout(sys.stderr):
        prepare_study(study)
    runs = synthetic_records.write_runs(study.directory, VARIANTS, seeds, lines)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = work()
        seconds[name] = time.perf_counter() - began
        return value

    with contextlib.redirect_stdout(sys.stderr):
        timed(NEXT_RUN, lambda: go_to_next_run(study))
    built = timed("report: numbers", lambda: build.build_report(study.directory))
    timed("report.json", lambda: files.finite(build.as_json(built)))
    document = timed("report: document", lambda: report_document(built, study.directory))
    timed("report.md", lambda: render_markdown(document))
    timed("report.html", lambda: render_html(document))
    timed(REPORT, lambda: run_report_command(study.directory))
    size = sum(path.stat().st_size for path in (study.directory / "runs").rglob("*") if path.is_file())
    return {"runs": runs, "lines_a_run": lines, "bytes": size, "used": len(built.rows), "seconds": seconds}


def go_to_next_run(study: Study) -> None:
    """Do all that `make` does in its process before the next training process."""
    stopping = StudyUpToNextRun(study.symbols, study.config_text)
    with contextlib.suppress(NextRunError):
        stopping.run()
        raise BenchError("the study has finished; it needs runs that are still missing")


def run_report_command(study_dir: Path) -> None:
    """Run the command of `make report`, which is the subject here."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.report", str(study_dir)], capture_output=True, text=True
    )
    if done.returncode:
        raise BenchError(f"make report failed: {last_message(done.stderr)}")


def table(data: dict[str, Any]) -> ResultTable:
    """List the seconds of each part, with the sum of planning and reporting and its goal."""
    seconds = data["seconds"]
    cells = tuple((name, f"{value:.2f}") for name, value in seconds.items())
    title = (
        f"cost of {data['runs']:,} synthetic records, {data['lines_a_run']:,} lines of metrics each, "
        f"{data['bytes'] / 2**20:,.0f} MiB"
    )
    both = seconds[NEXT_RUN] + seconds[REPORT]
    note = f"planning and reporting: {both:.2f} s (goal at {GOAL_RUNS:,} runs: {GOAL_SECONDS:g} s)"
    return ResultTable(title, ("part", "seconds"), cells, (note,))


SUITE = Suite(
    "records",
    "seconds of planning and reporting by the number of recorded runs",
    run,
    {"SHAPE": "runs, or runs x lines of metrics, such as 1000x500; 1000 runs by default"},
)
