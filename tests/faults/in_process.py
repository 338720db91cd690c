"""`make` with its training in this process, without the seconds in which a process loads torch.

For tests of what follows a study. Tests of training processes are in tests/study and tests/faults, those of the
examination of variants in tests/study, tests/scripts and tests/study.
"""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from gpt2 import evaluator
from gpt2 import training_step as step
from runtime import checkpoint
from runtime.signals import Stop
from study import worker
from study.executors.executor import Ended, Message, Started, Task, read_exit
from study.study import Study
from tests.faults.inject.sitecustomize import Fault, install
from tests.faults.workplace import Workplace, wait_for

PATCHED = (
    (step.Stepper, "step"),
    (step, "linear_cross_entropy"),
    (checkpoint, "_flush"),
    (evaluator.validation, "perplexity"),
    (evaluator.hellaswag, "score"),
)  # by `install`


class InProcessExecutor:
    """Executes each task when it is submitted."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def slots(self) -> int:
        return 1

    def submit(self, task: Task) -> None:
        start = len(task.log.read_text()) if task.log.exists() else 0
        with (
            task.log.open("a") as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "argv", ["scripts.train", str(task.plan)])
            patch.setattr(Stop, "install", lambda stop, parent=0: stop)  # the signals are those of the tests
            status = worker.main()
        lines = task.log.read_text()[start:].splitlines() or [""]
        end = Ended(task.name, status, lines[-1], read_exit(task.folder).get("answer"))
        self._messages += [Started(task.name), end]

    def poll(self, seconds: float) -> Sequence[Message]:
        found, self._messages = self._messages, []
        return found

    def stop(self, names: Sequence[str]) -> None:
        assert not names, "all have ended"

    def close(self) -> str:
        return ""


def train(place: Workplace, fault: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `make` in a workplace without examining its variants. Returns its status and its output.

    fault: injected into the training; no signal.
    """
    wait_for(place.unlocked)  # processes of an earlier study may end a moment later
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(sys, "path", list(sys.path))
            for owner, name in PATCHED:  # restored at the end
                patch.setattr(owner, name, getattr(owner, name))
            install(Fault(fault), slower=0.0)
        patch.setattr(Study, "admit", lambda study: None)
        patch.setattr(Study, "executor", lambda study: InProcessExecutor())
        return place.here("scripts.study")
