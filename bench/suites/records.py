"""Measure planning and reporting for a study of many recorded runs: `make bench SUITE=records`.

The records are synthetic, in a temporary folder. Their notes and commit mark them as synthetic.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.suite import Session, Suite, SuiteResult
from bench.tables import ResultTable
from bench.temporary_studies import configure_study, prepare_study
from bench.workers import BenchError, Worker
from gpt2.artifacts import run_record
from gpt2.system.errors import UserError
from gpt2.system.files import write_json
from study.executors.child_process import Slot
from study.executors.executor import Executor, Task
from study.executors.local import LocalExecutor
from study.report.write import write_report
from study.runner.study import Study

VARIANTS = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
GOAL_SECONDS, GOAL_RUNS = 5.0, 1000
METRICS_LINES = 1000  # of each run
NEXT_RUN, REPORT = "make, to the start of its next run", "make report, in a new process"
NOTE = "synthetic record of make bench, written to measure reporting; no model was trained"
EVALUATIONS, UPDATE_TOKENS = 20, 512 * 1024
FINGERPRINT = ("model", "data", "tokenizer", "batch", "schedule", "validation")


class NextRunError(Exception):
    """The study has reached the start of its next run."""


class NextRunExecutor(LocalExecutor):
    """An executor that stops the study where it would start its next training process."""

    def submit(self, task: Task) -> None:
        raise NextRunError


class StudyUpToNextRun(Study):
    def executor(self) -> Executor:
        return NextRunExecutor(self.session, [Slot("")])


def run(session: Session) -> SuiteResult:
    """Measure `make` up to its next run and `make report`, each in a new worker."""
    sizes = re.fullmatch(r"(\d+)(?:x(\d+))?", session.shape or str(GOAL_RUNS))
    if not sizes:
        raise UserError(f"SHAPE={session.shape} is no number of runs; fix: SHAPE=1000 or SHAPE=1000x500")
    seeds, lines = max(1, int(sizes[1]) // len(VARIANTS)), int(sizes[2] or METRICS_LINES)
    with tempfile.TemporaryDirectory() as folder:
        with Worker("planning") as worker:
            study_dir, next_run = worker.call(seconds_to_next_run, Path(folder), seeds, lines)
        began = time.perf_counter()
        with Worker("make report") as worker:
            worker.call(report, study_dir)
        seconds = {NEXT_RUN: next_run, REPORT: time.perf_counter() - began}
        size = sum(path.stat().st_size for path in (study_dir / "runs").rglob("*") if path.is_file())
    data = {"runs": seeds * len(VARIANTS), "lines_a_run": lines, "bytes": size, "seconds": seconds}
    return SuiteResult(data, (table(data),))


def seconds_to_next_run(folder: Path, seeds: int, lines: int) -> tuple[Path, float]:
    """Write the runs of a study; time all that `make` does before its next training process. Call in a worker.

    The runs of one more seed are missing, so that `make` has something to plan.
    """
    symbols = {"VARIANTS": " ".join(VARIANTS), "SEEDS": str(seeds + 1), "HELLASWAG": "n"}
    study = configure_study(folder, "gpt2-ra-ablation-smoke", DATA_DIR=str(folder / "data"), **symbols)
    prepare_study(study)
    write_runs(study.directory, VARIANTS, seeds, lines)
    began = time.perf_counter()
    with contextlib.suppress(NextRunError):
        StudyUpToNextRun(study.symbols, study.config_text).run()
        raise BenchError("the study has finished; it needs runs that are still missing")
    return study.directory, time.perf_counter() - began


def report(study_dir: Path) -> None:
    write_report(study_dir)


def write_runs(study_dir: Path, variants: tuple[str, ...], seeds: int, steps: int) -> None:
    """Write run.json and metrics.jsonl (one line a step) of every variant and seed."""
    for seed in range(seeds):
        draw = random.Random(seed)
        metrics = [
            {"event": "train", "iteration": step, "tokens": step * UPDATE_TOKENS, "train_seconds": float(step),
             "loss": 4.0 + 6.0 / step + draw.gauss(0, 0.05), "gradient_norm": 1.0 + draw.random(),
             "learning_rate": 6e-4, "tokens_per_second": 5e5}
            for step in range(1, steps + 1)
        ]  # fmt: skip
        lines = "".join(json.dumps(line) + "\n" for line in metrics)
        for variant in variants:
            value = synthetic_record(variant, seed, steps)
            run_dir = study_dir / "runs" / value["run"]
            run_dir.mkdir(parents=True)
            write_json(run_dir / "run.json", run_record.from_json(value).to_json())
            (run_dir / "metrics.jsonl").write_text(lines, encoding="utf-8")


def synthetic_record(variant: str, seed: int, steps: int) -> dict[str, Any]:
    """Return a finished record by run.schema.json. Its numbers depend on (variant, seed) only."""
    draw = random.Random(f"{variant} {seed}")
    loss = 4.0 + draw.gauss(0, 0.02)
    points = [steps * UPDATE_TOKENS * place // EVALUATIONS for place in range(1, EVALUATIONS + 1)]
    history = [[point, point / UPDATE_TOKENS, loss + 5 * (1 - point / points[-1]) ** 2] for point in points]
    values: dict[str, Any] = {
        "status": "finished",
        "commit": "synthetic",
        "dirty": False,
        "config_sha256": "synthetic",
        "fingerprint": dict.fromkeys(FINGERPRINT, "synthetic") | {"initial_weights": f"seed {seed}"},
        "target": {"name": "cpu", "device": "synthetic", "memory_bytes": 2**34, "dtype": "float32",
                   "attention_backend": "flash", "torch": None, "driver": None},
        "batch": {"effective": 512, "micro": 32, "accumulation": 16, "world_size": 1, "block_size": 1024},
        "parameters": 124_439_808,
        "progress": {"iterations": steps, "tokens": points[-1], "train_seconds": float(steps)},
        "clock": {"train": float(steps), "compile": 40.0, "evaluate": 90.0, "checkpoint": 9.0, "data": 1.0},
        "validation": {"loss": loss, "perplexity": math.exp(loss), "best_perplexity": math.exp(loss),
                       "tokens": 2**17, "history": history},
        "hellaswag": {"acc": 0.3, "acc_stderr": 0.005, "acc_norm": 0.31, "acc_norm_stderr": 0.005, "items": 10042},
        "memory": {"peak_allocated_bytes": 2**30, "peak_reserved_bytes": 2**31, "predicted_bytes": None,
                   "by_phase": {"forward": 1, "backward": 1, "optimizer": 1}},
        "throughput": {"tokens_per_second": float(UPDATE_TOKENS), "mfu": 0.4},
        "schedule": {"iterations": steps, "cut": False},
        "notes": [NOTE],
    }  # fmt: skip
    if variant == "RALEARN":
        path = [[point, [0.5 + 0.01 * draw.random() for _ in range(12)]] for point in points]
        values["learned"] = {"alternation_probability": path[-1][1], "history": path}
    return run_record.blank(run_record.run_name(variant, seed), variant, seed).to_json() | values


def table(data: dict[str, Any]) -> ResultTable:
    """List the seconds of each part, with their sum and its goal."""
    cells = tuple((name, f"{value:.2f}") for name, value in data["seconds"].items())
    title = (
        f"cost of {data['runs']:,} synthetic records, {data['lines_a_run']:,} lines of metrics each, "
        f"{data['bytes'] / 2**20:,.0f} MiB"
    )
    both = sum(data["seconds"].values())
    note = f"planning and reporting: {both:.2f} s (goal at {GOAL_RUNS:,} runs: {GOAL_SECONDS:g} s)"
    return ResultTable(title, ("part", "seconds"), cells, (note,))


SUITE = Suite(
    "records",
    "seconds of planning and reporting by the number of recorded runs",
    run,
    shape="runs, or runs x lines of metrics, such as 1000x500; 1000 runs by default",
)
