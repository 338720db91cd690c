"""The state of every run of a study, from its files alone: the study may run in another terminal or on a cluster."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from referee.verdict.statistics import mean
from runtime import run_record
from runtime.dotconfig import read_symbols
from runtime.output import duration
from runtime.settings import Config
from study import plan_file
from study.executors.claims import (
    BEAT_SECONDS,
    STALE_SECONDS,
    Holder,
    is_locked,
    newest,
    read_holder,
    this_machine,
)
from study.executors.executor import last_step
from study.plan_file import Plan
from study.runs import EXPECTED, read_expected, run_folders
from study.terminal import START_SECONDS, expected_seconds

COLUMNS = ("run", "state", "progress", "loss", "tok/s", "host", "place")
WATCH_SECONDS = 2 * BEAT_SECONDS  # a living holder on another machine changes its claim in this time


@dataclass(frozen=True)
class RunStatus:
    """A run. done: fraction of its iterations. seconds: on its clocks so far. reason: of a failure."""

    name: str
    variant: str
    state: str
    done: float = 0.0
    loss: float | None = None  # of the last step; of GRPO its reward
    tokens_per_second: float | None = None
    holder: Holder | None = None
    seconds: float = 0.0
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        host, place = (self.holder.host, self.holder.place) if self.holder else ("", "")
        return (
            self.name,
            self.state,
            f"{self.done:.0%}",
            "" if self.loss is None else f"{self.loss:.3f}",
            "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            host,
            place,
        )


def living(folders: Iterable[Path], sleep: Callable[[float], None] = time.sleep) -> set[Path]:
    """Return the runs whose holder lives: by its flock on this machine, by the change of its claim elsewhere.

    A claim that is recent by its file's time has changed. The others are watched for WATCH_SECONDS, all at once: the
    clocks of two machines need not agree.
    """
    alive, watched = set(), {}
    for folder in folders:
        found = newest(folder)
        holder = read_holder(found[1])
        if holder is None or holder.done:
            continue
        if holder.machine == this_machine():
            if is_locked(folder):
                alive.add(folder)
        elif is_recent(folder / f"claim.{found[0]:08d}"):
            alive.add(folder)
        else:
            watched[folder] = found
    if watched:
        print(
            f"{len(watched)} runs of other machines have old claims; watching them for {WATCH_SECONDS:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        sleep(WATCH_SECONDS)
    return alive | {folder for folder, found in watched.items() if newest(folder) != found}


def is_recent(claim: Path) -> bool:
    """Return whether a claim has changed in the last STALE_SECONDS, by this machine's clock."""
    try:
        age = time.time() - claim.stat().st_mtime
    except FileNotFoundError:  # a new holder has removed it
        return True
    return -BEAT_SECONDS < age < STALE_SECONDS


def run_status(folder: Path, variant: str, plan: Plan | None, alive: bool) -> RunStatus:
    """Read the state of one run. alive: whether a process executes it."""
    try:
        record = run_record.load(folder)
    except run_record.RecordError:
        record = None
    holder = read_holder(newest(folder)[1])
    missing = "damaged" if (folder / "run.json").exists() else "waiting"
    state: str = "running" if alive else record.status if record else missing
    if state == "running" and not alive:
        state = "lost" if holder and not holder.done else "interrupted"
    step = last_step(folder)
    planned = plan.variants[variant].iterations if plan and variant in plan.variants else 0
    done = 1.0 if state == "finished" else step.iteration / planned if step and planned else 0.0
    clock = record.clock if record else None
    return RunStatus(
        folder.name,
        variant,
        state,
        min(done, 1.0),
        (step.loss if step.reward is None else step.reward) if step else None,
        step.tokens_per_second if step else None,
        holder,
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
    running = [run for run in runs if run.state == "running"]
    rest = [each * (1 - run.done) for run in running]
    waiting = each * sum(1 - run.done for run in runs if run.state not in ("running", "finished"))
    return max([*rest, (sum(rest) + waiting) / max(len(running), 1)])


def read_status(study_dir: Path) -> tuple[list[RunStatus], Plan | None]:
    """Return the state of every expected run, in the order of execution. PlanFileError for a damaged plan."""
    plan = plan_file.read(study_dir)
    if (study_dir / EXPECTED).exists():
        names = {
            run_record.run_name(variant, seed): variant for variant, seed in read_expected(study_dir).all_runs
        }
    else:
        names = {}
    for folder in run_folders(study_dir)[0]:
        if folder.name not in names:
            names[folder.name] = folder.name.rstrip("0123456789")
    folders = {name: study_dir / "runs" / name for name in names}
    alive = living(folders.values())
    return [
        run_status(folders[name], variant, plan, folders[name] in alive) for name, variant in names.items()
    ], plan


def status_text(study_dir: Path) -> str:
    """Return the table of runs, the reasons of failures and the remaining time."""
    runs, plan = read_status(study_dir)
    counts = Counter(run.state for run in runs)
    lines = [f"{study_dir}: {len(runs)} runs, {', '.join(f'{n} {state}' for state, n in counts.items())}"]
    columns = ["reward" if name == "loss" and plan and plan.task == "grpo" else name for name in COLUMNS]
    rows = [columns, *(run.cells for run in runs)]
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
    elif not counts["running"]:
        about = f" (about {duration(left)} with one at a time)" if left is not None else ""
        lines.append(f"nothing runs now; `make` continues{about}")
    return "\n".join(lines)
