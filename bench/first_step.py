"""Run one training process up to its first optimizer step and report the time of each part.

python -m bench.first_step STUDY_DIR VARIANT SEED --parent PID      started by the suite startup, as a study does
"""

from __future__ import annotations

import time

ENTERED = time.monotonic()  # before the imports below: the time until here belongs to the interpreter

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

# No training process needs these.
HEAVY = ("datasets", "wandb", "transformers", "plotly", "trackio", "pyarrow")
EVENT = "first step"


def main() -> int:
    """Run the training command with a mark at the end of each part. The process exits after its first step."""
    from gpt2.train.clocks import device_synchroniser
    from gpt2.train.step import Stepper
    from ra import variants  # noqa: F401  (the training command imports it for a run)
    from study.runner import plan, worker  # noqa: F401

    marks = [ENTERED, time.monotonic()]

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(stepper: Stepper, *arguments: Any, **named: Any) -> Any:
            marks.append(time.monotonic())
            value = function(stepper, *arguments, **named)
            device_synchroniser(stepper.device)()
            marks.append(time.monotonic())
            return value

        return call

    def first_step(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        loaded = [name for name in HEAVY if name in sys.modules]
        print(json.dumps({"event": EVENT, "marks": marks, "loaded": loaded}), flush=True)
        os._exit(0)

    step = marked(Stepper.step)
    Stepper.__init__ = marked(Stepper.__init__)  # type: ignore[method-assign]
    Stepper.step = first_step  # type: ignore[method-assign,assignment]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
