"""Run a study: prepare data, plan, run the missing runs seed by seed, report after every run.

`Study(...).run()` is all of `make`. Finished runs are never changed.
"""

from __future__ import annotations

import functools
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2 import dataset, hellaswag
from gpt2.validation import check_texts
from runtime import files, records, resolved_target, run_record
from runtime.batch_plan import BatchPlan
from runtime.detected_hardware import cpu_threads, detected_target_name
from runtime.dotconfig import Symbols
from runtime.errors import UserError, disk_full
from runtime.gpu_specs import TARGETS
from runtime.output import LiveLine, duration
from runtime.records import parse
from runtime.run_plan import RunPlan, Start
from study import admit, amend_plan, plan_file, planner
from study.amend_plan import check_starts, continued
from study.dispatch import Dispatcher, full_disk_error
from study.executors.child_process import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_OUT_OF_MEMORY,
    Session,
    Slot,
    StopAsked,
    exit_text,
    local_slots,
    threads_notice,
)
from study.executors.executor import Executor, LocalExecutor, Task, run_tasks
from study.executors.ray_executor import RayExecutor
from study.executors.slurm_executor import SlurmExecutor
from study.plan_file import Plan
from study.planner import Asked, CountArms, CountedArms, Device, Question, Steps
from study.preconditions import (
    checkpoint_bytes,
    locked,
    quarantine_damaged,
    refuse_another_configuration,
    refuse_another_plan,
    refuse_other_items,
    require_space,
    snapshot_sources,
)
from study.report import report_page as write
from study.report.report_page import render_terminal
from study.runs import RunList, module, read_records
from study.step_timing import DoesNotFitError, Timing
from study.study_settings import StudySettings
from study.terminal import (
    Estimate,
    Terminal,
    beside_note,
    expected_seconds,
    final_share,
    summary,
)
from study.trackers import sync_note
from study.tuned_rates import (
    FOLDER,
    choose,
    judged_names,
    judged_study,
    read_choice,
    share_plan,
    tuning_study,
)

STOPPED = 130  # exit status


def run_study(symbols: Symbols, config_text: str) -> int:
    """Run the study of .config, and before it that of CONFIG_LEARNING_RATES. Return the exit status."""
    settings = StudySettings.from_symbols(symbols)
    if not settings.rates:
        return Study(symbols, config_text).run()
    directory = settings.directory
    if (directory / "runs").exists() and not (directory / FOLDER).exists():
        raise UserError(
            f"{directory} has runs without CONFIG_LEARNING_RATES; fix: set another CONFIG_STUDY_NAME, or "
            'CONFIG_LEARNING_RATES=""'
        )
    known = read_choice(directory)
    tuned = known is not None and set(settings.variants) <= set(known.arms)
    if not tuned and Study(*tuning_study(settings, config_text)).run() == STOPPED:
        return STOPPED
    choice = choose(settings)
    names = judged_names(settings.variants, {name: one.rate for name, one in choice.arms.items()})
    share_plan(directory, names)
    primary = choice.names[settings.primary] if settings.primary else ""
    return Study(*judged_study(settings, config_text, names, primary)).run()


class Study:
    """The runs of one configuration in results/<name>/."""

    def __init__(self, symbols: Symbols, config_text: str) -> None:
        self.symbols, self.config_text = symbols, config_text
        self.settings = StudySettings.from_symbols(symbols)
        self.directory = self.settings.directory
        self.config = plan_file.read_config(symbols, self.directory)
        self.session = Session()
        self.hellaswag: dict[str, Any] = {}  # entries of the plan of each run
        self._counted: dict[BatchPlan | None, CountedArms] = {}
        wanted = self.settings
        self.runs = RunList(self.directory, wanted.variants, wanted.seed_range)

    @functools.cached_property
    def resolved(self) -> resolved_target.ResolvedTarget:
        """Resolve the device. Call after export_environment, which selects the visible devices."""
        if self.settings.executor == "local":
            return resolved_target.resolve(self.config.target)
        print(f"asking {self.settings.executor} for a node, to know its device", flush=True)
        return parse(resolved_target.ResolvedTarget, self.ask(self.executor(), Device()), "resolved")

    @functools.cached_property
    def slots(self) -> list[Slot]:
        """Divide this machine among runs at once. UserError where it has too few cards or cores."""
        config, wanted, target = self.config, self.settings.slots, self.config.target
        machine = (self.resolved, target.cpu_threads, target.ranks)
        return local_slots(wanted, *machine, config.small_step)

    def has_checkpoint_or_result(self, name: str) -> bool:
        """Return whether a run of this variant, of any seed, is finished or has a checkpoint."""
        return any(
            record.variant == name and (record.status == "finished" or checkpoint_bytes(folder))
            for folder, record in read_records(self.directory).items()
        )

    # -- all of `make` ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the missing runs; return the exit status for the shell."""
        for message in quarantine_damaged(self.directory):
            print(message)
        refuse_another_configuration(self.directory, self.config_text)
        if self.settings.continues:
            new = [run for run in self.runs.pending() if not checkpoint_bytes(self.runs.folder(*run))]
            check_starts(self.settings.continues, self.config_text, new)
        if self.directory.exists():
            snapshot_sources(self.directory, self.settings.variants, self.has_checkpoint_or_result)
        left = not plan_file.read_begun(self.directory) or self.runs.pending()
        if not left:
            self.runs.write_expected()
            return self.nothing_to_do()
        detected = detected_target_name()
        notice = resolved_target.scale_notice(self.config.target, detected)
        if notice:
            print(notice)
        resolved_target.export_environment(
            self.config.target.name, detected, self.config.target.deterministic
        )
        with locked(self.directory) as lock, self.session.signals():
            self.session.lock = lock
            try:
                return self.run_pending()
            except OSError as error:
                number = disk_full(error)
                if not number:
                    raise
                raise full_disk_error(self.directory, number) from error
            except StopAsked:
                self.session.close()
                self.report()
                print(f"stopped; `make` continues from there: {self.directory}")
                return STOPPED

    def run_pending(self) -> int:
        """Prepare data and plan, execute the pending runs, write the report. Returns the exit status."""
        self.require_space()  # before anything that takes long
        local = self.settings.executor == "local"
        resolved = self.resolved
        note = f" ({resolved.note})" if resolved.note else ""
        print(f"on {resolved.device_name}, {resolved.dtype}{note}")
        if local:
            self.executor()  # may raise UserError
            target = self.config.target
            notice = threads_notice(resolved, target.cpu_threads, target.ranks, cpu_threads(0))
            if notice:
                print(notice)
        self.prepare()
        self.execute_pending(self.plan())
        print(render_terminal(self.report()))
        print(f"report: {self.directory / 'report.html'} (and .md)    records: {self.directory / 'runs'}")
        unfinished = [run_record.run_name(*run) for run in self.runs.pending()]
        if unfinished:
            print(f"not finished: {', '.join(unfinished)}; fix: `make` retries them", file=sys.stderr)
        if note := sync_note(self.directory):
            print(note)
        return 1 if unfinished else 0

    def execute_pending(self, plan: Plan) -> None:
        """Execute the pending runs, with a report after each."""
        executor = self.executor()  # reads the queue before it is known what is finished
        left = self.runs.pending()
        for run in left:
            refuse_another_plan(self.runs.folder(*run), self.plan_run(plan, *run))
        self.require_space(plan)
        local = self.settings.executor == "local"
        if local:
            plan = self.with_places(plan, executor.slots())
        slots = min(executor.slots() if local else self.settings.slots, len(left))
        evaluation, count = self.config.evaluation, len(self.runs.all())
        each = expected_seconds(plan, evaluation)
        estimate = Estimate(len(left), each, slots, final_share(plan, evaluation))
        terminal = Terminal(estimate, count)
        terminal.say(summary(plan, self.settings.variants, len(left), count, each, slots))
        driver = Dispatcher(
            self.runs, self.config, self.config_text, executor, self.session, self.plan_run, self.report
        )
        driver.execute(left, plan, terminal)

    @functools.cached_property
    def parameters(self) -> int:
        """The parameters of the model. Of GRPO, UserError where its runs lack something."""
        if self.config.grpo:
            return int(module("grpo.gsm8k").require_inputs(self.config.grpo, self.config.batch.effective))
        return self.config.model.parameters

    def require_space(self, plan: Plan | None = None) -> None:
        """UserError where the disk is too full for the pending runs; without a plan, for their checkpoints alone."""
        left = self.runs.pending()
        counts = [plan.variants[name].iterations if plan else 0 for name, _ in left]
        written = sum(checkpoint_bytes(self.runs.folder(*run)) for run in left)
        kept = "grpo" if self.config.grpo else self.config.optimizer.schedule
        require_space(self.directory, self.parameters, counts, kept, written)

    def with_places(self, plan: Plan, slots: int) -> Plan:
        """Write the runs at once on this machine and the threads of a run into the plan."""
        threads, target = None, self.config.target
        if self.resolved.device_type == "cpu" and target.ranks == 1:
            threads = target.cpu_threads or max(1, cpu_threads(0) // slots)
        note = beside_note(min(slots, len(self.runs.pending())))
        notes = dict.fromkeys((*plan.notes, note) if note else plan.notes)
        plan = plan.replace(notes=tuple(notes), slots=slots, threads=threads or plan.threads)
        plan_file.write(self.directory, plan)
        self.config = plan_file.read_config(self.symbols, self.directory)
        return plan

    def plan_run(self, plan: Plan, arm: str, seed: int) -> RunPlan:
        """Return all that the worker of a run reads."""
        row, shorter = plan.variants[arm], plan.continues
        folder = Path(shorter.study) / "runs" / run_record.run_name(arm, seed) if shorter else None
        return RunPlan(
            task="grpo" if self.config.grpo else "gpt2",
            study=self.directory.name,
            arm=arm,
            seed=seed,
            settings=self.config,
            batch=plan.batch,
            iterations=row.iterations,
            warmup_iterations=row.warmup_iterations,
            predicted_bytes=row.predicted_bytes,
            target=plan.target,
            start=Start(folder, shorter.iterations[arm], shorter.schedule) if shorter and folder else None,
            **self.hellaswag,
        )

    def executor(self) -> Executor:
        """Return the executor of .config."""
        settings, threads = self.settings, self.config.target.cpu_threads
        target = self.config.target
        cards = 0 if target.scale_cpu or target.name == "cpu" else target.ranks
        if settings.executor == "slurm":
            return SlurmExecutor(self.directory, settings.slots, settings.slurm_options, cards)
        if settings.executor == "ray":
            resources: dict[str, Any] = {"num_cpus": max(threads, 1) * target.ranks}
            if cards and TARGETS[target.name].kind == "npu":
                resources["resources"] = {"NPU": cards}
            else:
                resources["num_gpus"] = cards
            return RayExecutor(settings.ray_address, settings.slots, resources)
        return LocalExecutor(self.session, self.slots)

    def nothing_to_do(self) -> int:
        print(f"nothing to run: all {len(self.runs.all())} runs of {self.settings.name} are finished")
        self.report()
        print(f"report: {self.directory / 'report.html'} (and .md)")
        return 0

    # -- before the runs ----------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Check or prepare what the runs read. UserError for what they could not use."""
        if self.config.grpo:  # `parameters` has checked it
            return
        self.admit()
        directory = dataset.prepare(self.config.data, report=print)
        dataset.check_corpus(directory, self.config.model.block_size, report=print)
        self.hellaswag = self.find_hellaswag()
        check_texts(self.config, report=print)

    def find_hellaswag(self) -> dict[str, Any]:
        """Find the HellaSwag items once for all runs: the entries of their plans."""
        evaluation = self.config.evaluation
        if not evaluation.hellaswag:
            return {"hellaswag_absent": "CONFIG_HELLASWAG is off"}
        source = hellaswag.obtain(evaluation, self.config.data.directory, report=print)
        if isinstance(source, str):
            print(f"HellaSwag will not be scored: {source}")
            return {"hellaswag_absent": source}
        items = hellaswag.load_items(source, evaluation.hellaswag_limit)
        refuse_other_items(self.directory, source, len(items), hellaswag.digest(items))
        return {"hellaswag": source}

    def admit(self) -> None:
        """Examine the variants of the pending runs. UserError for one that fails a check."""
        arms = list(dict.fromkeys(name for name, _ in self.runs.pending()))
        autocast = self.resolved.dtype == "bfloat16"
        admit.require_admitted(admit.examine_cached(arms, self.config, autocast))

    def count(self, existing: BatchPlan | None = None) -> CountedArms:
        """Count the arms in a process of their own: this one never imports a variant."""
        if self.config.grpo:
            return planner.grpo_arms(self.config, self.settings, existing)
        if existing not in self._counted:
            asked = CountArms(self.settings, self.resolved, existing, self.copies())
            self._counted[existing] = parse(CountedArms, self.ask(self.here(), asked), "counted arms")
        return self._counted[existing]

    def plan(self) -> Plan:
        """Return the existing plan, or create one by timing steps on the device."""
        snapshot_sources(self.directory, self.settings.variants, self.has_checkpoint_or_result)
        plan = plan_file.read_begun(self.directory)
        named = self.config.numerics_fix or self.config.monitor.targets  # names that the model may lack
        missing = plan is None or not set(self.settings.variants) <= plan.variants.keys()
        arms = self.count(plan.batch if plan else None).arms if named or missing else {}
        files.write_text(self.directory / "config", self.config_text)
        self.runs.write_expected()
        if plan is None:
            plan = self.make_plan()
        else:
            plan = amend_plan.with_variants(self.directory, plan, arms, self.make_plan)
        if self.settings.continues:
            plan = continued(plan, self.settings.continues, self.settings.first_seed)
        return plan_file.write(self.directory, amend_plan.with_design(self.directory, plan, self.settings))

    def make_plan(self, existing: BatchPlan | None = None) -> Plan:
        """Create a plan. existing: batch of a previous plan."""
        note = planner.load_note(self.config)
        if note:
            print(f"notice: {note}")
        plan = planner.make_plan(
            self.config,
            self.settings,
            self.resolved,
            self.count,
            self.time_steps,
            existing,
            self.copies(),
        )
        return plan.replace(notes=(*plan.notes, *filter(None, [note])))

    def copies(self) -> int:
        """Return how many processes time steps at once: on a CPU, runs at once share caches and memory."""
        alone = self.settings.executor != "local" or self.resolved.device_type != "cpu"
        return 1 if alone else min(self.executor().slots(), len(self.runs.all()))

    def time_steps(self, names: Sequence[str], batch: BatchPlan, seconds: float) -> dict[str, Timing]:
        """Time steps of the variants in turn, in one separate process."""
        text = f"planning: timing steps of {', '.join(names)}, at most {duration(seconds * len(names))}"
        print(text, flush=True)
        began, line = time.monotonic(), LiveLine()
        with line:
            timings = self.run_tasks(
                self.executor(),
                Steps(tuple(names), batch.micro, seconds),
                self.copies(),
                lambda: line.update(f"{text}; {duration(time.monotonic() - began)} passed"),
                f"timing {names[0]} failed",
            )
        peak = timings[0]["peak_bytes"] if len(names) == 1 else None
        return {
            name: Timing((tuple(step for timing in timings for step in timing["seconds"][name]),), peak)
            for name in names
        }

    def here(self) -> Executor:
        """Return an executor of this machine."""
        if self.settings.executor == "local":
            return self.executor()
        return LocalExecutor(self.session, [Slot("")])

    def ask(self, executor: Executor, asked: Asked) -> Mapping[str, Any]:
        """Return the answer of a process that may import variants. UserError is that of the process."""
        return self.run_tasks(executor, asked)[0]

    def run_tasks(
        self,
        executor: Executor,
        asked: Asked,
        copies: int = 1,
        waiting_for: Callable[[], None] = lambda: None,
        what: str = "",
    ) -> list[Mapping[str, Any]]:
        """Return the answers of `copies` processes at once. StopAsked; UserError if one fails.

        what: the beginning of its message; "": it is the message of the process.
        """
        token, log = uuid.uuid4().hex[:8], self.directory / "plan.log"
        tasks = []
        for n in range(copies):
            folder = self.directory / f"task-{token}-{n}"
            folder.mkdir(parents=True)
            path = folder / f"{type(asked).__name__}.json"
            records.write(path, Question(self.config, asked), self.directory.name)
            tasks.append(Task(path, log))
        try:
            ended = run_tasks(executor, tasks, waiting_for)
        finally:
            for task in tasks:
                shutil.rmtree(task.folder, ignore_errors=True)
        if self.session.asked:
            raise StopAsked
        for one in ended:
            if one.status == EXIT_OUT_OF_MEMORY:
                raise DoesNotFitError(one.message)
            if one.status != EXIT_FINISHED or one.answer is None:
                if one.status == EXIT_FAILED and not what:
                    raise UserError(one.message.removeprefix("error: "))
                how = "lost with its machine" if one.status is None else exit_text(one.status)
                raise UserError(f"{what or 'planning failed'}, {how}: {one.message} (see {log})")
        return [one.answer for one in ended if one.answer is not None]

    def report(self) -> Any:
        """Write the report; UserError if it cannot be written."""
        try:
            return write.write_report(self.directory)
        except OSError as error:
            if disk_full(error):  # run names the fix
                raise
            raise UserError(
                f"the report in {self.directory} cannot be written: {error.strerror or error}; the records are "
                "complete; fix: make the folder writable, then run `make report`"
            ) from error
