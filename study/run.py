"""A study: prepare, plan once, run what is missing seed by seed, report after every run.

`Study(...).run()` is the whole of `make`. Whatever is finished is never touched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from gpt2 import data, hellaswag, record, target
from gpt2.batch import BatchPlan
from gpt2.config import Config, Symbols
from gpt2.errors import UserError
from gpt2.hardware import detected_target_name
from gpt2.track import Trackers
from ra.settings import AlternationSettings
from ra.variants import Variant, variant
from study import plan as planning
from study import report
from study.child import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY, Child, how_it_ended
from study.settings import StudySettings
from study.terminal import Estimate, Terminal, duration, short

# What may change between two `make` of one study without making its runs incomparable.
FREE_SYMBOLS = {
    "SEEDS", "VARIANTS", "CHECKPOINT_SECONDS", "DATA_WORKERS", "DATA_DIR", "RESULTS_DIR",
    "WANDB", "WANDB_MODE", "WANDB_PROJECT", "TRACKIO",
}  # fmt: skip


class StudyError(UserError, RuntimeError):
    """The study cannot go on as it is."""


class StopAsked(BaseException):
    """A signal asked the study to stop."""


class Study:
    """The runs of one configuration in results/<name>/."""

    def __init__(self, symbols: Symbols, config_text: str) -> None:
        self.symbols, self.config_text = symbols, config_text
        self.config = Config.from_symbols(symbols)
        self.settings = StudySettings.from_symbols(symbols)
        self.directory = self.settings.results_dir / self.settings.name
        self.child: Child | None = None
        self.asked = 0

    def all_runs(self) -> list[tuple[str, int]]:
        """Every (variant, seed), seed by seed, so that each night gives a full comparison."""
        return [(name, seed) for seed in range(self.settings.seeds) for name in self.settings.variants]

    def run_dir(self, name: str, seed: int) -> Path:
        return self.directory / "runs" / record.run_name(name, seed)

    def status(self, name: str, seed: int) -> str:
        """The recorded status, or "missing"."""
        try:
            return str(record.load(self.run_dir(name, seed))["status"])
        except record.RecordError:
            return "missing"

    def left(self) -> list[tuple[str, int]]:
        return [run for run in self.all_runs() if self.status(*run) != "finished"]

    # -- the whole of it ----------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run what is left; the exit status for the shell."""
        self.refuse_another_configuration()
        if self.directory.exists() and not self.left():
            return self.nothing_to_do()
        detected = detected_target_name()
        notice = target.scale_notice(self.config.target, detected)
        if notice:
            print(notice)
        os.environ.update(target.environment_for(self.config.target.name, detected))
        with self.locked(), self.signals():
            try:
                return self.work()
            except StopAsked:
                self.report()
                print(f"stopped; `make` goes on where it was: {self.directory}")
                return 130

    def work(self) -> int:
        resolved = target.resolve(self.config.target)
        print(
            f"on {resolved.device_name}, {resolved.dtype}" + (f" ({resolved.note})" if resolved.note else "")
        )
        data.prepare(self.config.data, report=print)
        self.find_hellaswag()
        plan = self.plan(resolved)
        left = self.left()
        terminal = Terminal(Estimate(len(left), self.expected_seconds(plan)), len(self.all_runs()))
        terminal.say(self.summary(plan, len(left)))
        try:
            for run in left:
                self.one(run, plan, terminal)
                self.report()
        finally:
            terminal.close()
        print(report.render_terminal(self.report()))
        print(f"report: {self.directory / 'report.md'}    records: {self.directory / 'runs'}")
        failed = [record.run_name(*run) for run in self.left()]
        if failed:
            print(f"not finished: {', '.join(failed)}; `make` tries them again", file=sys.stderr)
        return 1 if failed else 0

    def nothing_to_do(self) -> int:
        print(f"nothing to run: all {len(self.all_runs())} runs of {self.settings.name} are finished")
        print(f"report: {self.directory / 'report.md'}")
        return 0

    # -- before the runs ----------------------------------------------------------------------------------------

    def refuse_another_configuration(self) -> None:
        """The study's runs must stay comparable: name every symbol that differs from when it began."""
        path = self.directory / "config"
        if not path.exists():
            return
        before = _values(path.read_text())
        now = _values(self.config_text)
        names = sorted((before.keys() | now.keys()) - FREE_SYMBOLS)
        differing = [
            f"CONFIG_{n}: {before.get(n)} -> {now.get(n)}" for n in names if before.get(n) != now.get(n)
        ]
        if differing:
            raise StudyError(
                f"{self.directory} was begun with another configuration ({'; '.join(differing)}); "
                "right: another CONFIG_STUDY_NAME, or the configuration that it was begun with"
            )

    def find_hellaswag(self) -> None:
        """Once for the study: where HellaSwag's items are, or why there are none, for every run to read."""
        found = {"absent": "CONFIG_HELLASWAG is off"}
        if self.config.evaluation.hellaswag:
            source = hellaswag.obtain(self.config.evaluation, self.config.data.directory, report=print)
            if isinstance(source, hellaswag.Absent):
                found = {"absent": source.reason}
                print(f"HellaSwag: absent, and recorded as absent: {source.reason}")
            else:
                hellaswag.load_items(source, self.config.evaluation.hellaswag_limit)  # a bad file fails here
                found = {"path": str(source)}
        record.write_json(self.directory / "hellaswag.json", found)

    def variants(self) -> dict[str, Variant]:
        alternation = AlternationSettings.from_symbols(self.symbols)
        return {name: variant(name, self.config.model, alternation) for name in self.settings.variants}

    def plan(self, resolved: target.ResolvedTarget) -> dict[str, Any]:
        """The plan that stands, or one made now; on the card, timed once for the study."""
        record.write_text(self.directory / "config", self.config_text)
        expected = {"variants": list(self.settings.variants), "seeds": self.settings.seeds}
        record.write_json(self.directory / "expected.json", expected)

        def make() -> dict[str, Any]:
            if self.config.budget.max_time_seconds:
                print("planning: timing steps of each kind of variant")
            return planning.make_plan(
                self.directory, self.config, self.settings, resolved, self.variants(), self.time_steps
            )

        standing = planning.load_plan(self.directory)
        if standing is None:
            return make()
        return planning.with_variants(self.directory, standing, self.variants(), make)

    def time_steps(self, name: str, batch: BatchPlan, seconds: float) -> planning.Timing:
        arguments = [str(self.directory), name, "0", "--time", str(seconds), "--micro", str(batch.micro)]
        timing: dict[str, Any] = {}
        with self.process(arguments, self.directory / "plan.log") as child:
            for event in child.events():
                timing = event
            status = child.wait()
        if status == EXIT_OUT_OF_MEMORY:
            raise planning.DoesNotFitError(child.last_words())
        if status != EXIT_FINISHED or timing.get("event") != "timing":
            raise StudyError(
                f"timing {name} failed, {how_it_ended(status)}: {child.last_words()} (see {child.log})"
            )
        return planning.Timing(timing["seconds"], timing["peak_bytes"])

    def expected_seconds(self, plan: dict[str, Any]) -> float | None:
        """Training seconds of an average run, as planned; None where no time budget asked for timing."""
        counts = [
            row["iterations"] * plan["classes"][row["class"]]["seconds_per_iteration"]
            for row in plan["variants"].values()
            if row["class"] in plan["classes"]
        ]
        return sum(counts) / len(counts) if counts else None

    def summary(self, plan: dict[str, Any], left: int) -> str:
        batch = plan["batch"]
        counts = ", ".join(
            f"{name} {plan['variants'][name]['iterations']}" for name in self.settings.variants
        )
        each = self.expected_seconds(plan)
        return (
            f"batch {batch['effective']} sequences of {batch['block_size']} tokens "
            f"= micro {batch['micro']} x accumulation {batch['accumulation']}; iterations: {counts}\n"
            f"{left} of {len(self.all_runs())} runs to do"
            + (f", about {duration(left * each)} of training" if each else "")
        )

    # -- a run --------------------------------------------------------------------------------------------------

    def one(self, run: tuple[str, int], plan: dict[str, Any], terminal: Terminal) -> None:
        """One run to its end: finished, failed, or stopped with everything saved."""
        name, directory = record.run_name(*run), self.run_dir(*run)
        directory.mkdir(parents=True, exist_ok=True)
        record.write_text(directory / "config", self.config_text)
        number = self.all_runs().index(run) + 1
        while True:
            terminal.begin(name, number, plan["variants"][run[0]]["iterations"])
            with self.process([str(self.directory), run[0], str(run[1])], directory / "log.txt") as child:
                trackers = None
                for event in child.events():
                    if (
                        trackers is None and event["event"] == "train"
                    ):  # from here on the record says "running"
                        trackers = Trackers(directory, self.config.tracking)
                    terminal.update(event)
                status = child.wait()
            if status not in (EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_OUT_OF_MEMORY):
                self.mark_failed(run, f"{how_it_ended(status)}: {child.last_words()}")
            told = trackers.finish() if trackers else None
            if told:
                terminal.say(told)
            if self.asked:
                terminal.end("stopped, saved")
                raise StopAsked
            if status == EXIT_OUT_OF_MEMORY and planning.fall_back(self.directory, plan, name):
                terminal.end(plan["notes"][-1])
                terminal.estimate.left += 1
                continue
            break
        if status == EXIT_OUT_OF_MEMORY:
            self.mark_failed(run, f"out of memory at the smallest micro-batch: {child.last_words()}")
        terminal.end(self.outcome(run))

    def outcome(self, run: tuple[str, int]) -> str:
        """A finished run in a line, or why it is not."""
        try:
            seen = record.load(self.run_dir(*run))
        except record.RecordError as error:
            return str(error)
        if seen["status"] != "finished":
            return f"{seen['status']}: {seen['error']}"
        parts = [f"perplexity {seen['validation']['perplexity'] or float('nan'):.2f}"]
        if seen["hellaswag"] and "acc" in seen["hellaswag"]:
            parts.append(f"HellaSwag {seen['hellaswag']['acc']:.1%} +- {seen['hellaswag']['acc_stderr']:.1%}")
        parts.append(
            f"{short(seen['progress']['tokens'])} tokens in {duration(seen['clock']['train'])} of training"
        )
        if seen["throughput"]["tokens_per_second"]:
            parts.append(f"{seen['throughput']['tokens_per_second']:,.0f} tok/s")
        parts.append(f"{seen['memory']['peak_allocated_bytes'] / 2**30:.2f} GiB")
        return "  ".join(parts)

    def mark_failed(self, run: tuple[str, int], reason: str) -> None:
        """A process that died could not write its own record: do it for it, keeping what it had written."""
        directory = self.run_dir(*run)
        try:
            seen = record.load(directory)
        except record.RecordError:
            seen = record.blank(record.run_name(*run), *run)
        if seen["status"] != "failed":
            record.write_json(directory / "run.json", seen | {"status": "failed", "error": reason})

    def report(self) -> Any:
        return report.write(self.directory)

    # -- processes, locks and signals ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def process(self, arguments: list[str], log: Path) -> Iterator[Child]:
        """A child that is never left behind."""
        if self.asked:
            raise StopAsked
        self.child = Child(arguments, log, {})
        try:
            yield self.child
        finally:
            if self.child.process.poll() is None:
                self.child.stop()
            self.child = None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Pass a request to stop on to the run, which saves; a second one ends it at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            self.asked += 1
            if self.child is None:
                raise StopAsked
            if self.asked == 1:
                print("\nstopping: the step is finished and saved (once more: at once)", flush=True)
                self.child.process.send_signal(signal.SIGTERM)
            else:
                self.child.kill()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One `make` a study. The system drops the lock with its process, so that none is ever stale."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = (self.directory / "lock").open("a+")
        except OSError as error:
            raise StudyError(
                f"{self.directory} cannot be written: {error.strerror}; see CONFIG_RESULTS_DIR"
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise StudyError(
                    f"{self.directory} is being run by process {file.read().strip() or 'unknown'}; "
                    "wait for it or stop it"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield


def _values(text: str) -> dict[str, str]:
    """CONFIG lines as they stand; symbols that are off are absent."""
    pairs = (line.partition("=") for line in text.splitlines() if line.startswith("CONFIG_"))
    return {name.removeprefix("CONFIG_"): value for name, _, value in pairs}
