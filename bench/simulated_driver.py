"""Drive a simulated cluster: thousands of runs on hundreds of slots, with failures, in seconds.

Time is simulated; the driver is real (study.runner.dispatch), and so are its files. Some runs are lost with their
machine, some end at a NaN and are retried, and the driver itself is replaced halfway, as after a kill.
"""

from __future__ import annotations

import contextlib
import heapq
import io
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpt2.artifacts import run_record
from gpt2.config.batch import BatchPlan
from gpt2.config.config import Config
from gpt2.config.dotconfig import read_symbols
from gpt2.system import files
from study.executors.child_process import EXIT_FINISHED, EXIT_NOT_FINITE, Event, Session
from study.executors.executor import Ended, Message, Started, Task, TaskProgress
from study.records.plan_file import CostClass, Plan, PlanBudget, PlanRow
from study.runner.dispatch import Dispatcher
from study.runner.terminal import Estimate, Terminal
from study.sweep.run_list import RunList

RUN_SECONDS, SPREAD = 7200.0, 0.1
PROGRESS_SECONDS = 60.0  # between two progress messages of a run
LOST, NOT_FINITE = 0.02, 0.01  # of the attempts
ITERATIONS = 1000


class DriverKilledError(Exception):
    """The simulated end of the first driver."""


@dataclass
class Simulation:
    """The cluster: its time, its running tasks, and what has happened to each run."""

    slots: int
    seed: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.ends: list[tuple[float, str, int | None]] = []  # a heap: time, task, status
        self.tasks: dict[str, Task] = {}
        self.finished: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.most_at_once = 0
        self.own_seconds = 0.0  # processor time of the simulation, which is not the driver's


class SimulatedExecutor:
    """The executor of one driver. kill_after: finished runs, after which this driver is killed."""

    def __init__(self, simulation: Simulation, kill_after: int = 0) -> None:
        self.simulation, self._kill_after = simulation, kill_after
        self._messages: list[Message] = [Started(name) for name in simulation.tasks]
        self._progress_at = simulation.now

    def slots(self) -> int:
        return self.simulation.slots

    def submit(self, task: Task) -> None:
        began, simulation = time.process_time(), self.simulation
        if task.name not in simulation.tasks:  # else it is followed
            simulation.attempts[task.name] += 1
            draw, seconds = (
                simulation.random.random(),
                RUN_SECONDS * simulation.random.uniform(1 - SPREAD, 1 + SPREAD),
            )
            status: int | None = EXIT_FINISHED
            if draw < LOST + NOT_FINITE:
                status = None if draw < LOST else EXIT_NOT_FINITE
                seconds *= simulation.random.random()
            heapq.heappush(simulation.ends, (simulation.now + seconds, task.name, status))
            simulation.tasks[task.name] = task
            simulation.most_at_once = max(simulation.most_at_once, len(simulation.tasks))
            self._messages.append(Started(task.name))
        simulation.own_seconds += time.process_time() - began

    def poll(self, seconds: float) -> Sequence[Message]:
        began, simulation = time.process_time(), self.simulation
        found, self._messages = self._messages, []
        if not found:
            simulation.now = min(simulation.ends[0][0], self._progress_at + PROGRESS_SECONDS)
            if simulation.now >= self._progress_at + PROGRESS_SECONDS:
                self._progress_at = simulation.now
                event = Event("train", iteration=500, iterations=ITERATIONS, loss=4.0, train_seconds=1.0)
                found += [TaskProgress(name, event) for name in simulation.tasks]
            while simulation.ends and simulation.ends[0][0] <= simulation.now:
                _, name, status = heapq.heappop(simulation.ends)
                task = simulation.tasks.pop(name)
                if status == EXIT_FINISHED:
                    simulation.finished[name] += 1
                    _write_record(task)
                found.append(Ended(name, status, "loss nan" if status else ""))
        simulation.own_seconds += time.process_time() - began
        if self._kill_after and simulation.finished.total() >= self._kill_after:
            raise DriverKilledError
        return found

    def stop(self, name: str) -> None:
        """A killed driver stops nothing."""

    def close(self) -> str:
        return ""


def _write_record(task: Task) -> None:
    """Write what the driver reads of a finished run."""
    _, variant, seed = task.arguments
    record = run_record.blank(task.name, variant, int(seed)).to_json() | {"status": "finished", "error": None}
    files.write_json(task.folder / "run.json", record)


@dataclass(frozen=True)
class DriverCost:
    """Processor seconds of the driver without reports, and its largest resident set."""

    runs: int
    slots: int
    simulated_hours: float
    attempts: int
    finished_once: int
    finished_twice: int
    most_at_once: int
    driver_seconds: float
    seconds_per_1000_runs: float
    share_of_a_core: float
    peak_bytes: int


def simulate(folder: Path, runs: int, slots: int, configuration: Path) -> dict[str, Any]:
    """Finish so many runs with two drivers, the first of which is killed halfway. Returns a DriverCost."""
    variants = ("B", "RAEARLY", "RALATE", "RAALL", "RALEARN")
    run_list = RunList(folder, variants, runs // len(variants), "RALEARN", None)
    row = PlanRow("standard", ITERATIONS, ITERATIONS * 64)
    plan = Plan(
        batch=BatchPlan(4, 4, 1, 1, 16),
        budget=PlanBudget(RUN_SECONDS, 0, 0),
        classes={"standard": CostClass(RUN_SECONDS / ITERATIONS)},
        variants=dict.fromkeys(variants, row),
    )
    folder.mkdir(parents=True, exist_ok=True)
    config = Config.from_symbols(read_symbols(configuration))
    simulation, began = Simulation(slots), time.process_time()
    for kill_after in (runs // 2, 0):
        executor, pending = SimulatedExecutor(simulation, kill_after), run_list.pending()
        terminal = Terminal(Estimate(len(pending), RUN_SECONDS, slots), runs, io.StringIO())
        driver = Dispatcher(run_list, config, configuration.read_text(), executor, Session(), lambda: None)
        running = [run for run in pending if run_record.run_name(*run) in simulation.tasks]
        waiting = [run for run in pending if run not in set(running)]
        with contextlib.suppress(DriverKilledError):
            driver.execute(running + waiting, plan, terminal)
    seconds = time.process_time() - began - simulation.own_seconds
    cost = DriverCost(
        runs=len(run_list.all()),
        slots=slots,
        simulated_hours=simulation.now / 3600,
        attempts=simulation.attempts.total(),
        finished_once=sum(count == 1 for count in simulation.finished.values()),
        finished_twice=sum(count > 1 for count in simulation.finished.values()),
        most_at_once=simulation.most_at_once,
        driver_seconds=seconds,
        seconds_per_1000_runs=1000 * seconds / len(run_list.all()),
        share_of_a_core=seconds / simulation.now,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    return asdict(cost)
