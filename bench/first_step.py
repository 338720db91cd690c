"""Run one training process up to its first optimizer step and report the time of each part.

python -m bench.first_step STUDY_DIR VARIANT SEED --parent PID      started by the suite startup, as a study does
"""

from __future__ import annotations

import time

ENTERED = time.monotonic()  # before the imports below: the time until here belongs to the interpreter

import functools  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

TRAINING = ("gpt2.train.trainer", "ra.variants", "study.runner.plan")  # imported by a training process
HEAVY = (
    "datasets",
    "wandb",
    "transformers",
    "plotly",
    "trackio",
    "pyarrow",
)  # no training process needs them
EVENT = "first step"


def main() -> int:
    """Run the training command with a mark at the end of each part. The process exits after its first step."""
    script = importlib.import_module("scripts.train")  # the command that a study starts, by the same name
    trainer, *_ = [importlib.import_module(name) for name in TRAINING]
    marks = [ENTERED, time.monotonic()]

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            marks.append(time.monotonic())
            value = function(*arguments, **named)
            trainer.device_synchroniser(arguments[0].device)()
            marks.append(time.monotonic())
            return value

        return call

    def first_step(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        loaded = [name for name in HEAVY if name in sys.modules]
        print(json.dumps({"event": EVENT, "marks": marks, "loaded": loaded}), flush=True)
        os._exit(0)

    step = marked(trainer.Stepper.step)
    trainer.Stepper.__init__ = marked(trainer.Stepper.__init__)
    trainer.Stepper.step = first_step
    status: int = script.main()
    return status


if __name__ == "__main__":
    from gpt2.system.errors import run_command

    run_command(main)
