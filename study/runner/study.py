"""A study: prepare, plan, run what is missing seed by seed, report after every run.

`Study(...).run()` is the whole of `make`. Whatever is finished is never touched again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2.artifacts import run_record
from gpt2.artifacts.experiment_loggers import ExperimentLoggers
from gpt2.config.batch import BatchPlan
from gpt2.config.config import Config, Symbols
from gpt2.data import dataset
from gpt2.eval import hellaswag, hellaswag_download
from gpt2.hardware import resolve
from gpt2.hardware.detect import detected_target_name
from gpt2.system import files
from gpt2.system.resource_errors import disk_full, free_bytes, gib
from ra.settings import AlternationSettings
from ra.variants import Variant, variant
from study.attention import inspect
from study.report import write
from study.report.write import render_terminal
from study.runner import amend_plan, replan, space
from study.runner import plan as planning
from study.runner.child_process import (
    EXIT_DISK_FULL,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FINITE,
    EXIT_OUT_OF_MEMORY,
    Child,
    Session,
    StopAsked,
    how_it_ended,
)
from study.runner.custom_sources import snapshot_sources
from study.runner.extend import finish_extension
from study.runner.guard import StudyError, locked, refuse_another_configuration, refuse_other_items
from study.runner.settings import StudySettings
from study.runner.status_text import expected_seconds, outcome, summary
from study.runner.terminal import Estimate, Terminal


class Study:
    """The runs of one configuration in results/<name>/."""

    def __init__(self, symbols: Symbols, config_text: str) -> None:
        self.symbols, self.config_text = symbols, config_text
        self.config = Config.from_symbols(symbols)
        self.settings = StudySettings.from_symbols(symbols)
        self.directory = self.settings.results_dir / self.settings.name
        self.session = Session()

    @functools.cached_property
    def resolved(self) -> resolve.ResolvedTarget:
        """The device; asked for only once the environment says which one torch may see."""
        return resolve.resolve(self.config.target)

    def all_runs(self) -> list[tuple[str, int]]:
        """Every (variant, seed), seed by seed, so that each night gives a full comparison."""
        return [(name, seed) for seed in range(self.settings.seeds) for name in self.settings.variants]

    def run_dir(self, name: str, seed: int) -> Path:
        return self.directory / "runs" / run_record.run_name(name, seed)

    def status(self, name: str, seed: int) -> str:
        """The recorded status, or "missing"."""
        try:
            return str(run_record.load(self.run_dir(name, seed))["status"])
        except run_record.RecordError:
            return "missing"

    def begun(self, name: str) -> bool:
        """Whether a run of this variant, of whatever seed, is finished or has a checkpoint to go on from."""
        for kind in run_record.CHECKPOINTS:
            for folder in self.directory.glob(f"runs/*/{kind}"):
                with contextlib.suppress(run_record.RecordError):
                    if run_record.load(folder.parent)["variant"] == name and any(folder.iterdir()):
                        return True
        return False

    def left(self) -> list[tuple[str, int]]:
        return [run for run in self.all_runs() if self.status(*run) != "finished"]

    # -- the whole of it ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run what is left; the exit status for the shell."""
        refuse_another_configuration(self.directory, self.config_text)
        finish_extension(self.directory)
        if self.directory.exists():
            snapshot_sources(self.directory, self.settings.variants, self.begun)
        if self.directory.exists() and not self.left():
            return self.nothing_to_do()
        detected = detected_target_name()
        notice = resolve.scale_notice(self.config.target, detected)
        if notice:
            print(notice)
        resolve.export_environment(self.config.target.name, detected)
        with locked(self.directory) as lock, self.session.signals():
            self.session.lock = lock
            try:
                return self.work()
            except OSError as error:
                if not disk_full(error):
                    raise
                raise self.full_disk(str(error)) from error
            except StopAsked:
                self.session.close()
                self.report()
                print(f"stopped; `make` goes on where it was: {self.directory}")
                return 130

    def work(self) -> int:
        resolved = self.resolved
        print(
            f"on {resolved.device_name}, {resolved.dtype}" + (f" ({resolved.note})" if resolved.note else "")
        )
        directory = dataset.prepare(self.config.data, report=print)
        dataset.check_corpus(directory, self.config.model.block_size, report=print)
        self.find_hellaswag()
        plan = self.plan()
        left = self.left()
        counts = [plan["variants"][name]["iterations"] for name, _ in left]
        written = sum(space.checkpoint_bytes(self.run_dir(*run)) for run in left)
        space.require(self.directory, self.config.model, counts, self.config.optimizer.schedule, written)
        terminal = Terminal(Estimate(len(left), expected_seconds(plan)), len(self.all_runs()))
        terminal.say(summary(plan, self.settings.variants, len(left), len(self.all_runs())))
        try:
            for run in left:
                self.one(run, plan, terminal)
                self.report()
        finally:
            terminal.close()
        self.look()
        print(render_terminal(self.report()))
        print(f"report: {self.directory / 'report.html'} (and .md)    records: {self.directory / 'runs'}")
        failed = [run_record.run_name(*run) for run in self.left()]
        if failed:
            print(f"not finished: {', '.join(failed)}; `make` tries them again", file=sys.stderr)
        return 1 if failed else 0

    def nothing_to_do(self) -> int:
        print(f"nothing to run: all {len(self.all_runs())} runs of {self.settings.name} are finished")
        if not write.is_current(self.directory):
            self.look()
            self.report()
        print(f"report: {self.directory / 'report.html'} (and .md)")
        return 0

    # -- before the runs ----------------------------------------------------------------------------------------

    def find_hellaswag(self) -> None:
        """Once for the study: where HellaSwag's items are, or why there are none, for every run to read."""
        found = {"absent": "CONFIG_HELLASWAG is off"}
        if self.config.evaluation.hellaswag:
            source = hellaswag_download.obtain(
                self.config.evaluation, self.config.data.directory, report=print
            )
            if isinstance(source, hellaswag_download.Absent):
                found = {"absent": source.reason}
                print(f"HellaSwag: absent, and recorded as absent: {source.reason}")
            else:
                items = hellaswag.load_items(source, self.config.evaluation.hellaswag_limit)
                digest = hellaswag.digest(items)
                refuse_other_items(self.directory, source, len(items), digest)
                found = {"path": str(source), "items_sha256": digest}
        files.write_json(self.directory / "hellaswag.json", found)

    def variants(self) -> dict[str, Variant]:
        alternation = AlternationSettings.from_symbols(self.symbols)
        return {name: variant(name, self.config.model, alternation) for name in self.settings.variants}

    def plan(self) -> dict[str, Any]:
        """The plan that stands, or one made now; on the card, timed before its first run."""
        replan.tidy(self.directory)
        snapshot_sources(self.directory, self.settings.variants, self.begun)
        files.write_text(self.directory / "config", self.config_text)
        expected = {"variants": list(self.settings.variants), "seeds": self.settings.seeds}
        files.write_json(self.directory / "expected.json", expected)

        plan = planning.load_plan(self.directory)
        if plan is None:
            begun = amend_plan.schedules_on_record(self.directory)  # before anything is timed: it may refuse
            made = amend_plan.with_counts(self.make_plan(), begun, self.config.optimizer)
            return planning.save_plan(self.directory, made)
        return amend_plan.with_variants(self.directory, plan, self.variants(), self.make_plan)

    def make_plan(self, batch: BatchPlan | None = None, margin: float | None = None) -> dict[str, Any]:
        """A plan of now. batch, margin: of one that stands."""
        if self.config.budget.max_time_seconds:
            print("planning: timing steps of each kind of variant")
        return planning.make_plan(
            self.config,
            self.settings,
            self.resolved,
            self.variants(),
            self.time_steps,
            batch,
            margin,
            self.time_together if self.resolved.device_type == "cpu" else None,
        )

    def time_steps(self, name: str, batch: BatchPlan, seconds: float) -> planning.Timing:
        """Steps of one variant, in a process of its own."""
        return self.time_together([name], batch, seconds)[name]

    def time_together(
        self, names: Sequence[str], batch: BatchPlan, seconds: float
    ) -> dict[str, planning.Timing]:
        """Steps of the variants in turn, in one process."""
        first, *others = names
        arguments = [str(self.directory), first, "0", "--time", str(seconds), "--micro", str(batch.micro)]
        arguments += ["--beside", *others] if others else []
        timing: dict[str, Any] = {}
        with self.session.process(arguments, self.directory / "plan.log") as child:
            for event in child.events():
                timing = event
            status = child.wait()
        if self.session.asked:
            raise StopAsked
        if status == EXIT_OUT_OF_MEMORY:
            raise planning.DoesNotFitError(child.last_words())
        if status != EXIT_FINISHED or timing.get("event") != "timing":
            raise StudyError(
                f"timing {', '.join(names)} failed, {how_it_ended(status)}: {child.last_words()} (see {child.log})"
            )
        peak = None if others else timing["peak_bytes"]
        return {name: planning.Timing(timing["seconds"][name], peak) for name in names}

    # -- a run --------------------------------------------------------------------------------------------------

    def one(self, run: tuple[str, int], plan: dict[str, Any], terminal: Terminal) -> None:
        """One run to its end: finished, failed, or stopped with everything saved."""
        name, directory = run_record.run_name(*run), self.run_dir(*run)
        number = self.all_runs().index(run) + 1
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            files.write_text(directory / "config", self.config_text)
            watch = replan.watch(self.directory, plan, *run)
            terminal.begin(name, number)
            before = record_text(directory)
            arguments = [str(self.directory), run[0], str(run[1])]
            with self.session.process(arguments, directory / "log.txt") as child:
                trackers, misplanned = self.listen(child, watch, directory, terminal)
                status = child.wait()
            if not trackers and self.status(*run) == "finished":  # before anything could be said of the plan
                trackers, misplanned = ExperimentLoggers(directory, self.config.tracking), ""
            told = trackers.finish() if trackers else None
            if told:
                terminal.say(told)
            if self.session.asked:
                saved = self.status(*run) in ("interrupted", "finished")
                stands = "stopped" if misplanned else "stopped; its last checkpoint stands"
                terminal.end("stopped, saved" if saved else stands)
                raise StopAsked
            again = misplanned or self.again(status, child, plan, name)
            if not again:
                break
            terminal.pause(again)
            if misplanned:
                self.plan_anew(name, plan, misplanned, terminal)
        if status not in (EXIT_FINISHED, EXIT_INTERRUPTED):
            self.mark_failed(run, f"{how_it_ended(status)}: {child.last_words()}", before)
        terminal.end(outcome(directory))

    def listen(
        self, child: Child, watch: replan.Watch | None, directory: Path, terminal: Terminal
    ) -> tuple[ExperimentLoggers | None, str]:
        """What a run's process tells, to its end or until the plan is found wrong: then it is ended, and why.

        Trackers begin when the record says "running" and it is sure that this run stays.
        """
        trackers, started = None, False
        for event in child.events():
            reason = watch.hear(event) if watch else ""
            if reason:
                child.kill()  # what it would save is not needed
                return None, reason
            started = started or event["event"] == "started"
            if started and not trackers and not (watch and watch.waiting):
                trackers = ExperimentLoggers(directory, self.config.tracking)
            terminal.update(event)
        if started and not trackers and not self.session.asked:  # it failed too soon to be sure of
            trackers = ExperimentLoggers(directory, self.config.tracking)
        return trackers, ""

    def plan_anew(self, name: str, plan: dict[str, Any], reason: str, terminal: Terminal) -> None:
        """Set the run aside, time the steps again, and give the plan, which no checkpoint needs, the counts of now."""
        replan.set_aside(self.directory, name)
        replan.anew(plan, self.make_plan(BatchPlan(**plan["batch"])), reason)
        planning.save_plan(self.directory, plan)
        terminal.estimate = Estimate(terminal.estimate.left, expected_seconds(plan))
        terminal.say(summary(plan, self.settings.variants, terminal.estimate.left, len(self.all_runs())))

    def again(self, status: int, child: Child, plan: dict[str, Any], name: str) -> str:
        """Why the run is to go on from its last checkpoint at once, or nothing; StudyError where no run could."""
        if status == EXIT_DISK_FULL:
            raise self.full_disk(child.last_words())
        if status == EXIT_NOT_FINITE:
            return f"{child.last_words()}; once more from the last checkpoint, to see whether it comes back"
        if status == EXIT_OUT_OF_MEMORY and planning.fall_back(
            self.directory, plan, name, self.config.model.dropout
        ):
            return str(plan["notes"][-1])
        return ""

    def full_disk(self, told: str) -> StudyError:
        return StudyError(
            f"{self.directory} is on a full disk ({gib(free_bytes(self.directory))} free): free some and run `make`, "
            f"which goes on from the last checkpoint ({told or 'no room for a message'})"
        )

    def mark_failed(self, run: tuple[str, int], reason: str, before: str) -> None:
        """A process that died could not write its own record: do it for it, keeping what it had written.

        before: the record's text when the process was started. What the process wrote itself stands: its own failure,
        and a run that it had finished before it died on its way out.
        """
        directory = self.run_dir(*run)
        try:
            seen = run_record.load(directory)
        except run_record.RecordError:
            seen = run_record.blank(run_record.run_name(*run), *run)
        if seen["status"] not in ("failed", "finished") or record_text(directory) == before:
            files.write_json(directory / "run.json", seen | {"status": "failed", "error": reason})

    def look(self) -> None:
        """What attention looks at, for the report. The numbers do not hang on it, so that no failure ends the study."""
        try:
            failed = inspect.look_at_study(self.directory)
        except Exception as error:
            failed = [" ".join(f"{type(error).__name__}: {error}".split())]
        for reason in failed:
            print(f"no pictures of attention: {reason}")

    def report(self) -> Any:
        """The report, brought up to date; a disk that is full now must not end the runs' numbers with it."""
        try:
            return write.write_report(self.directory)
        except OSError as error:
            raise StudyError(
                f"the report in {self.directory} cannot be written: {error.strerror or error}; the records stand, "
                "`make report` makes it anew"
            ) from error


def record_text(run_dir: Path) -> str:
    """run.json as it stands, or nothing."""
    try:
        return (run_dir / "run.json").read_text(encoding="utf-8")
    except OSError:
        return ""
