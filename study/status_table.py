"""The state of every run of a study, from its files alone: the study may run in another terminal or on a cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from referee.verdict.statistics import mean
from runtime import attempt, run_record
from runtime.attempt import Attempt, read_attempt
from runtime.dotconfig import read_symbols
from runtime.metrics_log import last_lines
from runtime.output import duration
from runtime.settings import Config
from study import plan_file
from study.executors.slurm_executor import Job, queue
from study.plan_file import Plan
from study.preconditions import LOCK, is_locked
from study.runs import BASELINE, read_expected, run_folders, to_baseline
from study.terminal import START_SECONDS, expected_seconds, last_result, remaining

COLUMNS = ("run", "state", "progress", "validation", f"to {BASELINE}", "tok/s", "host", "place")


@dataclass(frozen=True)
class RunStatus:
    """A run. done: fraction of its iterations. seconds: on its clocks so far. reason: of a failure."""

    name: str
    variant: str
    state: str
    done: float = 0.0
    validated: str = ""  # perplexity of the last validation; of GRPO its accuracy
    difference: str = ""  # to B, at the last tokens at which both were validated
    tokens_per_second: float | None = None
    attempt: Attempt | None = None
    seconds: float = 0.0
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            self.state,
            f"{self.done:.0%}",
            self.validated,
            self.difference,
            "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            self.attempt.host if self.attempt else "",
            self.attempt.place if self.attempt else "",
        )


def executes(folder: Path, job: Job | None, lock: Path, locked: bool) -> bool:
    """Whether a process executes a run: in Slurm, or since the driver that runs took the study's lock."""
    if job:
        return job.state == "RUNNING"
    begun = folder / attempt.FILE
    return locked and begun.exists() and begun.stat().st_mtime >= lock.stat().st_mtime


def run_status(folder: Path, variant: str, plan: Plan | None, alive: bool) -> RunStatus:
    """Read the state of one run. alive: whether a process executes it."""
    try:
        record = run_record.load(folder)
    except run_record.RecordError:
        record = None
    missing = "damaged" if (folder / "run.json").exists() else "waiting"
    state: str = record.status if record else missing
    if state != "finished" and alive:
        state = "running"
    elif state == "running":
        state = "interrupted"
    lines = last_lines(folder)
    step, validation = lines.get("train"), lines.get("validation")
    planned = plan.variants[variant].iterations if plan and variant in plan.variants else 0
    done = 1.0 if state == "finished" else step.iteration / planned if step and planned else 0.0
    clock = record.clock if record else None
    return RunStatus(
        folder.name,
        variant,
        state,
        min(done, 1.0),
        last_result(record, validation),
        to_baseline(folder, record) if record else "",
        step.tokens / step.train_seconds if step and step.train_seconds else None,
        read_attempt(folder),
        clock.total if clock else 0.0,
        (record.error or "") if record and state == "failed" else "",
    )


def seconds_left(runs: list[RunStatus], expected: float | None) -> float | None:
    """Estimate the remaining seconds at the present number of runs at once; None without a measurement.

    expected: seconds of an average run, until one is finished.
    """
    finished = [run.seconds for run in runs if run.state == "finished" and run.seconds > 0]
    each = START_SECONDS + mean(finished) if finished else expected
    if each is None:
        return None
    waiting = sum(1 - run.done for run in runs if run.state not in ("running", "finished"))
    return remaining(each, [run.done for run in runs if run.state == "running"], waiting)


def read_status(study_dir: Path) -> tuple[list[RunStatus], Plan | None]:
    """Return the state of every expected run, in the order of execution. PlanFileError for a damaged plan."""
    plan = plan_file.read(study_dir)
    expected = read_expected(study_dir).all_runs  # none without the file
    names = {run_record.run_name(variant, seed): variant for variant, seed in expected}
    for folder in run_folders(study_dir)[0]:
        if folder.name not in names:
            names[folder.name] = folder.name.rstrip("0123456789")
    jobs = (queue(study_dir) or {}) if (study_dir / "slurm").exists() else {}
    lock = study_dir / LOCK
    locked = is_locked(lock)
    found = []
    for name, variant in names.items():
        folder = study_dir / "runs" / name
        alive = executes(folder, jobs.get(name), lock, locked)
        status = run_status(folder, variant, plan, alive)
        queued = name in jobs and not alive and status.state != "finished"
        found.append(replace(status, state="queued") if queued else status)
    return found, plan


def status_text(study_dir: Path) -> str:
    """Return the table of runs, the reasons of failures and the remaining time."""
    runs, plan = read_status(study_dir)
    counts = Counter(run.state for run in runs)
    lines = [f"{study_dir}: {len(runs)} runs, {', '.join(f'{n} {state}' for state, n in counts.items())}"]
    rows = [COLUMNS, *(run.cells for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"{run.name}: {run.reason}" for run in runs if run.reason]
    lines += [f"{name}: not a run of this study: skipped" for name in run_folders(study_dir)[1]]
    if counts["finished"] == len(runs):
        return "\n".join([*lines, f"all runs are finished; report: {study_dir / 'report.html'}"])
    expected, config = None, study_dir / "config"
    if plan and config.exists():
        expected = expected_seconds(plan, Config.from_symbols(read_symbols(config)).evaluation)
    left = seconds_left(runs, expected)
    if left is not None and counts["running"]:
        lines.append(f"about {duration(left)} left with {counts['running']} at once")
    elif not counts["running"] and counts["queued"]:
        lines.append(f"{counts['queued']} wait in Slurm")
    elif not counts["running"]:
        about = f" (about {duration(left)} with one at a time)" if left is not None else ""
        lines.append(f"nothing runs now; `make` continues{about}")
    return "\n".join(lines)
