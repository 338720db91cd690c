"""Drive the runs of a study on an executor: submit, follow, retry, record failures, report.

One run at a time or thousands at once: the same loop. A run that ended is judged by its own record.
"""

from __future__ import annotations

import errno
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime import files, run_plan, run_record
from runtime.attempt import EXIT_SUPERSEDED
from runtime.errors import UserError, explain_full_disk
from runtime.files import DamagedFileError, read_text
from runtime.metrics_log import last_lines
from runtime.ranks import EXIT_RANK_LOST
from runtime.run_plan import RunPlan
from runtime.settings import Config
from study import plan_file, planner
from study.executors.child_process import (
    EXIT_DISK_FULL,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    Session,
    StopAsked,
    exit_text,
)
from study.executors.executor import Ended, Executor, Message, Notice, Task, TaskProgress
from study.plan_file import Plan
from study.runs import RunList, read_record
from study.terminal import Terminal, outcome

POLL_SECONDS = 1.0
MOST_LOSSES = 3  # of a run with its machine or with one of its ranks, without a step between them
# Ends of a run of several ranks that need not repeat: one was killed or did not answer; NCCL's watchdog aborts.
RANK_LOST = (EXIT_RANK_LOST, -signal.SIGKILL, -signal.SIGABRT)
REPORT_SHARE = 0.05  # most of the time that reports may take while several runs train

Run = tuple[str, int]  # variant, seed


@dataclass
class _Active:
    """A submitted run. before: text of its record. micro: the micro-batch that it was started with."""

    run: Run
    number: int
    before: str
    micro: int


class Dispatcher:
    """Executes runs on an executor. plan_run: returns the plan of a run. report: writes the study's report."""

    def __init__(
        self,
        runs: RunList,
        config: Config,
        config_text: str,
        executor: Executor,
        session: Session,
        plan_run: Callable[[Plan, str, int], RunPlan],
        report: Callable[[], object],
    ) -> None:
        self.runs, self.config, self.config_text = runs, config, config_text
        self.executor, self.session, self.plan_run, self.report = executor, session, plan_run, report
        self.directory = runs.directory
        self._active: dict[str, _Active] = {}
        self._waiting: deque[Run] = deque()
        self._losses: dict[Run, tuple[int, int]] = {}  # run -> its last step, losses since then
        self._reported_at, self._report_seconds = time.monotonic(), 0.0

    def execute(self, pending: Sequence[Run], plan: Plan, terminal: Terminal) -> Plan:
        """Execute the runs until each is finished or failed, or everything is saved after a request to stop.

        Returns the plan, with a smaller micro-batch if a run ran out of memory. StopAsked after a request to stop.
        """
        self.plan, self.terminal = plan, terminal
        self._numbers = {run: number for number, run in enumerate(self.runs.all(), 1)}
        self._waiting.extend(pending)
        try:
            while self._waiting or self._active:
                while self._waiting and len(self._active) < self.executor.slots() and not self.session.asked:
                    self._submit(self._waiting.popleft())
                for message in self.executor.poll(POLL_SECONDS):
                    self._take(message)
                if self.session.asked and not self._active:
                    raise StopAsked
        finally:
            note = self.executor.close()
            terminal.close()
            if note:
                terminal.say(note)
        return self.plan

    def _submit(self, run: Run) -> None:
        name, folder = run_record.run_name(*run), self.runs.folder(*run)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(folder / "config", self.config_text)
        self._active[name] = _Active(run, self._numbers[run], record_text(folder), self.plan.batch.micro)
        run_plan.write(folder, self.plan_run(self.plan, *run))
        self.executor.submit(Task(folder / run_plan.FILE, folder / "log.txt"))

    def _take(self, message: Message) -> None:
        if isinstance(message, Notice):
            self.terminal.say(message.text)
        elif isinstance(message, Ended):
            self._end(self._active.pop(message.name), message)
        elif isinstance(message, TaskProgress):
            self.terminal.update(message.name, message.line)
        else:
            active = self._active[message.name]
            iterations = self.plan.variants[active.run[0]].iterations
            self.terminal.begin(message.name, active.number, iterations, message.where)

    def _end(self, active: _Active, ended: Ended) -> None:
        """Retry the run that ended, or record its end."""
        run, name, folder = active.run, ended.name, self.runs.folder(*active.run)
        if self.session.asked:
            saved = self.runs.status(*run) in ("interrupted", "finished")
            self.terminal.end(name, "stopped, saved" if saved else "stopped; its last checkpoint is valid")
            return
        if ended.status == EXIT_SUPERSEDED:
            self.terminal.pause(name, ended.message.removeprefix("error: "))
            return
        lost = self._loss(ended)
        if lost and self._may_repeat(run):
            reason = f"{lost}; retrying from its last checkpoint"
        else:
            reason = self.retry_reason(active, ended)
        if reason:
            self.terminal.pause(name, reason)
            self._submit(run)
            return
        if ended.status not in (EXIT_FINISHED, EXIT_INTERRUPTED):
            if lost:
                reason = f"{lost}, {MOST_LOSSES} times without a step between them; see {folder / 'log.txt'}"
            elif ended.status is not None:
                reason = f"{exit_text(ended.status)}: {ended.message}"
            self.mark_failed(run, reason, active.before)
        self.terminal.end(name, outcome(folder))
        began = time.monotonic()
        self._report()
        self.terminal.estimate.add(time.monotonic() - began)

    def _loss(self, ended: Ended) -> str:
        """Describe the loss of a run with its machine, or with one of its ranks; "" where it ended by itself."""
        if ended.status is None:
            return "lost with its machine"
        if self.config.target.ranks == 1 or ended.status not in RANK_LOST:
            return ""
        words = ended.message.removeprefix("error: ").partition("; fix")[0]
        return words if ended.status == EXIT_RANK_LOST else f"{exit_text(ended.status)}: {words}"

    def _may_repeat(self, run: Run) -> bool:
        """Return whether a lost run is retried: it has made steps, or was not lost MOST_LOSSES times."""
        step = last_lines(self.runs.folder(*run)).get("train")
        at, (before, losses) = step.iteration if step else 0, self._losses.get(run, (0, 0))
        losses = 1 if at > before else losses + 1
        self._losses[run] = (at, losses)
        return losses < MOST_LOSSES

    def retry_reason(self, active: _Active, ended: Ended) -> str:
        """Return the reason to retry the run; empty: no retry. The plan can have a smaller micro-batch afterwards.

        Raises UserError if the disk is full.
        """
        if ended.status == EXIT_DISK_FULL:
            raise full_disk_error(self.directory, errno.ENOSPC, ended.message)
        if ended.status == EXIT_NOT_FINITE:
            return f"{ended.message}; retrying from the last checkpoint, to check whether it repeats"
        if ended.status == EXIT_OUT_OF_MEMORY:
            if self.plan.batch.micro < active.micro:  # another run has reduced it already
                return f"out of memory at micro-batch {active.micro}; retrying at {self.plan.batch.micro}"
            smaller = planner.smaller_batch(self.plan, ended.name, self.config.model.dropout)
            if smaller:
                self.plan = plan_file.write(self.directory, smaller)
                return smaller.notes[-1]
        return ""

    def mark_failed(self, run: Run, reason: str, before: str) -> None:
        """Write "failed" into the record of a run whose process ended without a result.

        before: the record's text when the process started. A status that the process itself recorded ("failed" or
        "finished") does not change.
        """
        folder = self.runs.folder(*run)
        record = read_record(folder) or run_record.blank(run_record.run_name(*run), *run)
        if record.status not in ("failed", "finished") or record_text(folder) == before:
            run_record.write(folder, record.replace(status="failed", error=reason))

    def _report(self) -> None:
        """Write the report. While other runs train, reports take at most REPORT_SHARE of the time."""
        began = time.monotonic()
        if self._active and began - self._reported_at < self._report_seconds / REPORT_SHARE:
            return
        self.report()
        self._reported_at = time.monotonic()
        self._report_seconds = self._reported_at - began


def full_disk_error(directory: Path, number: int, message: str = "") -> UserError:
    """Return the error of a full disk. message: of the training process, where it could write one."""
    reason = message.removeprefix("error: ")
    if "; fix: " not in reason:
        reason = "; fix: ".join(explain_full_disk(number, directory))
    return UserError(f"{reason}, then run `make`: it continues from the last checkpoint")


def record_text(run_dir: Path) -> str:
    """Return the text of run.json; empty if it cannot be read."""
    try:
        return read_text(run_dir / "run.json")
    except (FileNotFoundError, DamagedFileError):
        return ""
