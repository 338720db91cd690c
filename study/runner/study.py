"""Run a study: prepare data, plan, run the missing runs seed by seed, report after every run.

`Study(...).run()` is all of `make`. Finished runs are never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.artifacts import run_record
from gpt2.artifacts.experiment_loggers import ExperimentLoggers
from gpt2.config.batch import BatchPlan
from gpt2.config.config import Config
from gpt2.config.dotconfig import Symbols
from gpt2.data import dataset
from gpt2.eval import hellaswag, hellaswag_download
from gpt2.hardware import resolve
from gpt2.hardware.detect import detected_target_name
from gpt2.system import files
from gpt2.system.read_files import DamagedFileError, read_text
from gpt2.system.resource_errors import disk_full, explain_full_disk
from ra.settings import AlternationSettings
from ra.variants import Variant, variant
from study.admission import admit, ignore
from study.attention import inspect
from study.executors.child_process import (
    EXIT_DISK_FULL,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    Child,
    Event,
    Session,
    StopAsked,
    exit_text,
)
from study.records import plan_file
from study.records.hellaswag_scores import ItemsFile
from study.records.plan_file import Plan
from study.report import write
from study.report.write import render_terminal
from study.runner import amend_plan, planner
from study.runner.extend import finish_extension
from study.runner.preconditions import (
    StudyError,
    checkpoint_bytes,
    locked,
    quarantine_damaged,
    refuse_another_configuration,
    refuse_other_items,
    require_space,
    snapshot_sources,
)
from study.runner.settings import StudySettings
from study.runner.status_text import SpeedCheck, expected_seconds, outcome, summary
from study.runner.step_timing import DoesNotFitError, Timing
from study.runner.terminal import Estimate, Terminal
from study.sweep.run_list import RunList


class Study:
    """The runs of one configuration in results/<name>/."""

    def __init__(self, symbols: Symbols, config_text: str) -> None:
        self.symbols, self.config_text = symbols, config_text
        self.config = Config.from_symbols(symbols)
        self.settings = StudySettings.from_symbols(symbols)
        self.directory = self.settings.results_dir / self.settings.name
        self.session = Session()
        self.speed = SpeedCheck()
        wanted = self.settings
        self.runs = RunList(self.directory, wanted.variants, wanted.seeds, wanted.primary, wanted.rates)

    @functools.cached_property
    def resolved(self) -> resolve.ResolvedTarget:
        """Resolve the device. Call after export_environment, which selects the visible devices."""
        return resolve.resolve(self.config.target)

    def has_checkpoint_or_result(self, name: str) -> bool:
        """Return whether a run of this variant, of any seed, is finished or has a checkpoint."""
        for folder in self.directory.glob("runs/*/"):
            with contextlib.suppress(run_record.RecordError):
                record = run_record.load(folder)
                if self.runs.arm(record.variant) == name and (
                    record.status == "finished" or checkpoint_bytes(folder)
                ):
                    return True
        return False

    def has_plan(self) -> bool:
        """Return whether plan.json is a plan. A missing or damaged one is rebuilt, also of a finished study."""
        with contextlib.suppress(plan_file.PlanFileError):
            return plan_file.read(self.directory) is not None
        return False

    # -- all of `make` ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the missing runs; return the exit status for the shell."""
        for message in quarantine_damaged(self.directory):
            print(message)
        refuse_another_configuration(self.directory, self.config_text)
        finish_extension(self.directory)
        if self.directory.exists():
            snapshot_sources(self.directory, self.settings.variants, self.has_checkpoint_or_result)
        self.runs.read_choice()
        if (
            self.directory.exists()
            and not self.runs.pending()
            and not self.runs.unchosen()
            and self.has_plan()
        ):
            self.runs.write_expected()
            return self.nothing_to_do()
        detected = detected_target_name()
        notice = resolve.scale_notice(self.config.target, detected)
        if notice:
            print(notice)
        resolve.export_environment(self.config.target.name, detected, self.config.target.deterministic)
        with locked(self.directory) as lock, self.session.signals():
            self.session.lock = lock
            try:
                return self.run_pending()
            except OSError as error:
                number = disk_full(error)
                if not number:
                    raise
                raise self.full_disk(number) from error
            except StopAsked:
                self.session.close()
                self.report()
                print(f"stopped; `make` continues from there: {self.directory}")
                return 130

    def run_pending(self) -> int:
        """Prepare data and plan, execute the pending runs, write the report. Returns the exit status."""
        resolved = self.resolved
        print(
            f"on {resolved.device_name}, {resolved.dtype}" + (f" ({resolved.note})" if resolved.note else "")
        )
        self.admit()
        directory = dataset.prepare(self.config.data, report=print)
        dataset.check_corpus(directory, self.config.model.block_size, report=print)
        self.find_hellaswag()
        plan = self.execute_pending(self.runs.choose(self.plan()))
        if self.runs.unchosen():
            plan = self.runs.choose(plan)
            if not self.runs.unchosen() and self.runs.pending():
                plan = self.execute_pending(plan)
        self.inspect_attention()
        print(render_terminal(self.report()))
        print(f"report: {self.directory / 'report.html'} (and .md)    records: {self.directory / 'runs'}")
        unfinished = [run_record.run_name(*run) for run in self.runs.pending()]
        if unfinished:
            print(f"not finished: {', '.join(unfinished)}; fix: `make` retries them", file=sys.stderr)
        return 1 if unfinished else 0

    def execute_pending(self, plan: Plan) -> Plan:
        """Execute the pending runs, with a report after each. Returns the plan, which a run can change."""
        left = self.runs.pending()
        counts = [plan.row(name).iterations for name, _ in left]
        written = sum(checkpoint_bytes(self.runs.folder(*run)) for run in left)
        require_space(self.directory, self.config.model, counts, self.config.optimizer.schedule, written)
        terminal = Terminal(Estimate(len(left), expected_seconds(plan)), len(self.runs.all()))
        terminal.say(summary(plan, self.settings.variants, len(left), len(self.runs.all())))
        try:
            for run in left:
                plan = self.execute_run(run, plan, terminal)
                self.report()
        finally:
            terminal.close()
        return plan

    def nothing_to_do(self) -> int:
        print(f"nothing to run: all {len(self.runs.all())} runs of {self.settings.name} are finished")
        if not write.is_current(self.directory):
            self.inspect_attention()
            self.report()
        print(f"report: {self.directory / 'report.html'} (and .md)")
        return 0

    # -- before the runs ----------------------------------------------------------------------------------------

    def find_hellaswag(self) -> None:
        """Find the HellaSwag items once and save their path, or the reason why they are absent, for all runs."""
        found = ItemsFile(absent="CONFIG_HELLASWAG is off")
        if self.config.evaluation.hellaswag:
            source = hellaswag_download.obtain(
                self.config.evaluation, self.config.data.directory, report=print
            )
            if isinstance(source, str):
                found = ItemsFile(absent=source)
                print(f"HellaSwag will not be scored: {source}")
            else:
                items = hellaswag.load_items(source, self.config.evaluation.hellaswag_limit)
                digest = hellaswag.digest(items)
                refuse_other_items(self.directory, source, len(items), digest)
                found = ItemsFile(path=str(source), items_sha256=digest)
        files.write_json(self.directory / "hellaswag.json", found.to_json())

    def admit(self) -> None:
        """Examine the variants of the pending runs. AdmissionError for one that fails a check that is not ignored."""
        pending = list(dict.fromkeys(name for name, _ in self.runs.pending()))
        arms = list(dict.fromkeys(map(self.runs.arm, pending)))
        autocast = self.resolved.dtype == "bfloat16"
        examined = admit.examine_cached(arms, self.config, self.alternation, autocast)
        ignored = admit.ignored_failures(examined, self.settings.admission_ignore)
        ignore.write(
            self.directory,
            {name: ignored[self.runs.arm(name)] for name in pending if self.runs.arm(name) in ignored},
        )

    @property
    def alternation(self) -> AlternationSettings:
        return AlternationSettings.from_symbols(self.symbols)

    def variants(self) -> dict[str, Variant]:
        alternation = self.alternation
        return {name: variant(name, self.config.model, alternation) for name in self.settings.variants}

    def plan(self) -> Plan:
        """Return the existing plan, or create one by timing steps on the device."""
        snapshot_sources(self.directory, self.settings.variants, self.has_checkpoint_or_result)
        files.write_text(self.directory / "config", self.config_text)
        self.runs.write_expected()
        try:
            plan = plan_file.read(self.directory)
        except plan_file.PlanFileError as error:
            amend_plan.recorded_schedules(self.directory)  # raises if the plan cannot be rebuilt
            moved = files.quarantine(self.directory / plan_file.FILE)
            reason, _, _ = str(error).partition("; fix")
            print(f"{reason}; moved to {moved}; the plan is rebuilt from the records of the runs")
            plan = None
        variants = self.variants()
        optimizers = {name: variant.configure(self.config).optimizer for name, variant in variants.items()}
        if plan is None:
            recorded = amend_plan.recorded_schedules(self.directory)  # before any timing, since it may raise
            plan = amend_plan.restore_counts(self.make_plan(), recorded, optimizers)
        else:
            plan = amend_plan.with_variants(self.directory, plan, variants, optimizers, self.make_plan)
        return plan_file.write(self.directory, amend_plan.with_design(self.directory, plan, self.settings))

    def make_plan(self, existing: BatchPlan | None = None) -> Plan:
        """Create a plan. existing: batch of a previous plan."""
        if self.config.budget.max_time_seconds:
            print("planning: timing training steps of each cost class")
        return planner.make_plan(
            self.config,
            self.settings,
            self.resolved,
            self.variants(),
            self.time_steps,
            existing,
            self.time_together if self.resolved.device_type == "cpu" else None,
        )

    def time_steps(self, name: str, batch: BatchPlan, seconds: float) -> Timing:
        """Time steps of one variant in a separate process."""
        return self.time_together([name], batch, seconds)[name]

    def time_together(self, names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
        """Time steps of the variants in turn, in one separate process."""
        first, *others = names
        arguments = [str(self.directory), first, "0", "--time", str(seconds), "--micro", str(batch.micro)]
        arguments += ["--beside", *others] if others else []
        timing = Event("")
        with self.session.process(arguments, self.directory / "plan.log") as child:
            for event in child.events():
                timing = event
            status = child.wait()
        if self.session.asked:
            raise StopAsked
        if status == EXIT_OUT_OF_MEMORY:
            raise DoesNotFitError(child.last_words())
        if status != EXIT_FINISHED or timing.event != "timing":
            raise StudyError(
                f"timing {', '.join(names)} failed, {exit_text(status)}: {child.last_words()} (see {child.log})"
            )
        peak = None if others else timing.peak_bytes
        return {name: Timing((tuple(timing.seconds[name]),), peak) for name in names}

    # -- a run --------------------------------------------------------------------------------------------------

    def execute_run(self, run: tuple[str, int], plan: Plan, terminal: Terminal) -> Plan:
        """Execute one run until it is finished, failed, or stopped with everything saved.

        Returns the plan, with a smaller micro-batch if the run ran out of memory.
        """
        name, directory = run_record.run_name(*run), self.runs.folder(*run)
        number = self.runs.all().index(run) + 1
        trained_before = self.trained_seconds(*run)
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            files.write_text(directory / "config", self.config_text)
            terminal.begin(name, number)
            before, began = record_text(directory), time.monotonic()
            arguments = [str(self.directory), run[0], str(run[1])]
            with self.session.process(arguments, directory / "log.txt") as child:
                loggers = self.follow_events(child, directory, terminal)
                status = child.wait()
            message = loggers.finish() if loggers else None
            if message:
                terminal.say(message)
            if self.session.asked:
                saved = self.runs.status(*run) in ("interrupted", "finished")
                terminal.end("stopped, saved" if saved else "stopped; its last checkpoint is valid")
                raise StopAsked
            reason, plan = self.retry_reason(status, child, plan, name)
            if not reason:
                break
            terminal.pause(reason)
        if status not in (EXIT_FINISHED, EXIT_INTERRUPTED):
            self.mark_failed(run, f"{exit_text(status)}: {child.last_words()}", before)
        terminal.end(outcome(directory))
        if not trained_before and self.runs.status(*run) == "finished":
            self.check_speed(run, plan, time.monotonic() - began, terminal)
        return plan

    def check_speed(self, run: tuple[str, int], plan: Plan, wall_seconds: float, terminal: Terminal) -> None:
        """Print the new end time once if finished runs were slower than planned."""
        planned, trained = plan.planned_seconds(run[0]), self.trained_seconds(*run)
        left, now = terminal.estimate.left, datetime.datetime.now()
        message = self.speed.observe(planned, trained, wall_seconds, left, now)
        if message:
            terminal.say(message)

    def trained_seconds(self, name: str, seed: int) -> float:
        """Recorded seconds on the training clock of a run; 0 without a record."""
        try:
            clock = run_record.load(self.runs.folder(name, seed)).clock
        except run_record.RecordError:
            return 0.0
        return clock.train if clock else 0.0

    def follow_events(self, child: Child, directory: Path, terminal: Terminal) -> ExperimentLoggers | None:
        """Show the events of a run until its process ends. Start experiment loggers after its record is written."""
        loggers = None
        for event in child.events():
            if event.event == "started":
                loggers = ExperimentLoggers(directory, self.config.tracking)
            terminal.update(event)
        return loggers

    def retry_reason(self, status: int, child: Child, plan: Plan, name: str) -> tuple[str, Plan]:
        """Return the reason to retry the run (empty: no retry) and the plan to use.

        Raises StudyError if the disk is full.
        """
        if status == EXIT_DISK_FULL:
            raise self.full_disk(errno.ENOSPC, child.last_words())
        if status == EXIT_NOT_FINITE:
            return (
                f"{child.last_words()}; retrying from the last checkpoint, to check whether it repeats",
                plan,
            )
        if status == EXIT_OUT_OF_MEMORY:
            smaller = planner.smaller_batch(plan, name, self.config.model.dropout)
            if smaller:
                return smaller.notes[-1], plan_file.write(self.directory, smaller)
        return "", plan

    def full_disk(self, number: int, message: str = "") -> StudyError:
        """message: of the training process, where it could write one."""
        reason = message.removeprefix("error: ")
        if "; fix: " not in reason:
            reason = "; fix: ".join(explain_full_disk(number, self.directory))
        return StudyError(f"{reason}, then run `make`: it continues from the last checkpoint")

    def mark_failed(self, run: tuple[str, int], reason: str, before: str) -> None:
        """Write "failed" into the record of a run whose process ended without a result.

        before: the record's text when the process started. A status that the process itself recorded ("failed" or
        "finished") does not change.
        """
        directory = self.runs.folder(*run)
        try:
            record = run_record.load(directory)
        except run_record.RecordError:
            record = run_record.blank(run_record.run_name(*run), *run)
        if record.status not in ("failed", "finished") or record_text(directory) == before:
            run_record.write(directory, dataclasses.replace(record, status="failed", error=reason))

    def inspect_attention(self) -> None:
        """Create the attention maps of the report. No number depends on them, so a failure does not end the study."""
        try:
            reasons = inspect.inspect_study(self.directory)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            reasons = [f"{text}; fix: make attention RUN={self.directory / 'runs' / 'NAME'}"]
        for reason in reasons:
            print(f"attention maps not created; the rest of the report is complete: {reason}")

    def report(self) -> Any:
        """Write the report; StudyError if it cannot be written."""
        try:
            return write.write_report(self.directory)
        except OSError as error:
            if disk_full(error):  # run names the fix
                raise
            raise StudyError(
                f"the report in {self.directory} cannot be written: {error.strerror or error}; the records are "
                "complete; fix: make the folder writable, then run `make report`"
            ) from error


def record_text(run_dir: Path) -> str:
    """Return the text of run.json; empty if it cannot be read."""
    try:
        return read_text(run_dir / "run.json")
    except (FileNotFoundError, DamagedFileError):
        return ""
