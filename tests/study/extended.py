"""A study of very small runs that is made longer, in this process; and all that must agree to the last bit."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from copy import copy as copies
from pathlib import Path
from typing import Any

import pytest

from gpt2.artifacts import checkpoint, run_record
from gpt2.config.batch import plan_batch
from gpt2.config.config import Config
from gpt2.hardware.resolve import resolve
from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.system.signals import Interrupted, Stop
from gpt2.train.run_plan import RunPlan
from gpt2.train.trainer import TrainingRun
from ra.settings import AlternationSettings
from ra.variants import variant
from study.records import plan_file
from study.records.plan_file import Plan, PlanBudget, PlanRow
from study.runner.extend import extend, parse_factor
from study.runner.settings import StudySettings
from tests import small_runs

TOKENS = 4 * 16  # of an iteration
TEXT = "CONFIG_SCHEDULE_WSD=y\nCONFIG_GPT2_MAX_ITERS=10\nCONFIG_GPT2_MAX_TIME=0\nCONFIG_SEEDS=1\n"
FIRST, WARMUP, START = 10, 2, 7  # iterations, of the warm-up, before the decay


def configuration(texts: Path, dropout: float = 0.0, decay: float = 0.3, seconds: int = 0) -> Config:
    return small_runs.configuration(texts, FIRST, dropout=dropout, seconds=seconds, schedule=("wsd", decay))


class Place:
    """A study in a folder, its runs made in this process as scripts.train makes them."""

    def __init__(self, folder: Path, config: Config, names: tuple[str, ...], first: int = FIRST) -> None:
        self.config, self.settings = config, StudySettings("s", names, 1, folder, False)
        self.directory = folder / "s"
        self.directory.mkdir(parents=True)
        (self.directory / "config").write_text(TEXT)
        expected = {"variants": list(names), "seeds": 1}
        files.write_json(self.directory / "expected.json", expected)
        plan = Plan(
            batch=plan_batch(4, 2, 1, 16),
            budget=PlanBudget(**dataclasses.asdict(config.budget)),
            variants={
                name: PlanRow("any", first, first * TOKENS, warmup_iterations=WARMUP) for name in names
            },
        )
        plan_file.write(self.directory, plan)

    def plan(self) -> Plan:
        plan = plan_file.read(self.directory)
        assert plan
        return plan

    def folder(self, name: str = "B") -> Path:
        return self.directory / "runs" / f"{name}0"

    def run(self, name: str = "B", stop: Stop | None = None) -> str:
        plan = self.plan()
        row = plan.variants[name]
        run_plan = RunPlan(
            directory=self.folder(name), run=f"{name}0", variant=name, seed=0, iterations=row.iterations,
            batch=plan.batch, warmup_iterations=row.warmup_iterations, extended=plan.extended or 1.0,
        )  # fmt: skip
        attention = variant(name, self.config.model, AlternationSettings("output", 0.5, 100.0)).parts
        return TrainingRun(
            run_plan, self.config, resolve(self.config.target), attention, stop or Stop()
        ).train()

    def extend(self, factor: str = "2") -> list[str]:
        return extend(self.config, self.settings, TEXT, parse_factor(factor))

    def refusal(self, factor: str = "2") -> str:
        """What extend says, having changed nothing."""
        before = contents(self.directory)
        with pytest.raises(UserError) as caught:
            self.extend(factor)
        assert contents(self.directory) == before
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def alter(self, name: str = "B", **entries: Any) -> None:
        seen = run_record.load(self.folder(name))
        run_record.write(self.folder(name), run_record.from_json(seen.to_json() | entries))


def interrupt_at_every_step(
    place: Place, folder: Path, action: Callable[[Place], object], complete: Callable[[Place], object]
) -> int:
    """Interrupt `action` at its first step, at its second, ... and complete it. Returns the number of steps.

    A step is a write, a removal or a renaming. Each time the files must be those of an action without interruption.
    The study is copied into subfolders of `folder`.
    """

    def copy(number: int) -> Place:
        copied = copies(place)
        copied.settings = dataclasses.replace(place.settings, results_dir=folder / f"copy{number}")
        copied.directory = folder / f"copy{number}" / place.directory.name
        shutil.copytree(place.directory, copied.directory)
        return copied

    whole = copy(0)
    action(whole)
    for number in itertools.count(1):
        left = number

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Interrupted("SIGKILL")
                return function(*arguments, **named)

            return call

        cut = copy(number)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Interrupted):
            for owner, names in STEPS.items():
                for name in names:
                    patch.setattr(owner, name, counted(getattr(owner, name)))
            action(cut)
            return number - 1
        complete(cut)
        assert contents(cut.directory) == contents(whole.directory), number
        shutil.rmtree(cut.directory)
    raise AssertionError


STEPS: dict[Any, tuple[str, ...]] = {
    files: ("write_bytes",),
    shutil: ("copyfile", "copytree", "rmtree"),
    Path: ("unlink", "rename", "replace", "mkdir"),
}


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def outcome(folder: Path) -> tuple[Any, ...]:
    """Weights, optimizer, every training loss and rate, every validation loss: what must agree to the last bit."""
    loaded = checkpoint.load_latest(folder / "checkpoint")
    assert loaded
    seen = run_record.load(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (
        loaded.iteration,
        loaded.state,
        [
            [line[key] for key in ("iteration", "loss", "learning_rate", "grad_norm")]
            for line in lines
            if line["event"] == "train"
        ],
        [[tokens, loss] for tokens, _, loss in seen.validation.history],
        seen.learned,
        [seen.status, seen.progress.iterations],
        json.loads((folder / "validation_windows.json").read_text()),
    )
