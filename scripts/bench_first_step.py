"""`make bench FIRST_STEP=1`: seconds from the start of a training process to the end of its first optimizer step.

python -m scripts.bench_first_step [--rounds 5]                   prepares two studies in a temporary folder, measures
python -m scripts.bench_first_step STUDY_DIR VARIANT SEED ...     scripts.train up to its first step, with the parts
"""

from __future__ import annotations

import time

ENTERED = time.monotonic()  # before the imports below: what came earlier is the interpreter's

import argparse  # noqa: E402
import functools  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

from gpt2.errors import run_command  # noqa: E402

GOAL_SECONDS = 20.0
STUDIES = ("gpt2-ra-ablation-smoke", "gpt2-ra-ablation")
PARTS = ("interpreter", "imports", "settings and data", "model", "opening the run", "first step")
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
    if any(argument == "--parent" for argument in sys.argv):  # as the study starts its training processes
        return inside()
    parser = argparse.ArgumentParser(prog="make bench FIRST_STEP=1")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in STUDIES:
            print(text(name, measure(Path(folder) / name, name, arguments.rounds)), flush=True)
    return 0


def measure(folder: Path, name: str, rounds: int, **values: str) -> list[dict[str, Any]]:
    """One dict a round: seconds of each part, "total", and which of HEAVY were loaded. The study is prepared first."""
    from gpt2 import record
    from scripts.bench_studies import prepare, study_in

    fixed = {"HELLASWAG": "n", "GPT2_MAX_TIME": "0", "GPT2_MAX_ITERS": "20", "DATA_DIR": str(folder / "data")}
    study = study_in(folder, name, **fixed | values)
    prepare(study)
    variant, seen = study.settings.variants[0], []
    for number in range(rounds):
        run_dir = study.directory / "runs" / record.run_name(variant, number)
        run_dir.mkdir(parents=True)
        seen.append(one_start([str(study.directory), variant, str(number)], run_dir / "log.txt"))
    return seen


def one_start(arguments: list[str], log: Path) -> dict[str, Any]:
    """Start a training process as the study does, and hear its parts."""
    from study.bench import BenchError
    from study.child import Child

    began = time.monotonic()
    child = Child(arguments, log, module="scripts.bench_first_step")
    found = [event for event in child.events() if event["event"] == EVENT]
    status = child.wait()
    if not found:
        raise BenchError(f"no first step, exit status {status}: {child.last_words()}")
    marks = [began, *found[0]["marks"]]
    parts = dict(zip(PARTS, (b - a for a, b in itertools.pairwise(marks)), strict=True))
    return parts | {"total": marks[-1] - began, "loaded": found[0]["loaded"]}


def inside() -> int:
    """scripts.train with marks at the ends of the parts; the process ends with its first step."""
    from gpt2 import train
    from ra import variants  # noqa: F401  (what scripts.train imports for a run)
    from scripts import train as script
    from study import memory, plan  # noqa: F401

    marks = [ENTERED, time.monotonic()]

    def marked(function: Callable[..., Any], before: bool, after: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if before:
                marks.append(time.monotonic())
            value = function(*arguments, **named)
            if after:
                train.device_synchroniser(arguments[0].device)()
                marks.append(time.monotonic())
            return value

        return call

    def first_step(*arguments: Any, **named: Any) -> None:
        marked(step, True, True)(*arguments, **named)
        loaded = [name for name in HEAVY if name in sys.modules]
        print(json.dumps({"event": EVENT, "marks": marks, "loaded": loaded}), flush=True)
        os._exit(0)

    step = train.Stepper.step
    train.Stepper.__init__ = marked(train.Stepper.__init__, True, True)  # type: ignore[method-assign]
    train.Stepper.step = first_step  # type: ignore[method-assign,assignment]
    return script.main()


def text(name: str, seen: list[dict[str, Any]]) -> str:
    """Medians of the parts and the total's spread, against the goal."""
    parts = ", ".join(f"{part} {median(row[part] for row in seen):.2f}" for part in PARTS)
    totals = [row["total"] for row in seen]
    loaded = sorted({module for row in seen for module in row["loaded"]})
    return (
        f"{name}: first step after {median(totals):.2f} s [{min(totals):.2f}, {max(totals):.2f}], median of "
        f"{len(seen)} (goal: {GOAL_SECONDS:g} s)\n  seconds: {parts}\n"
        f"  heavy packages loaded: {', '.join(loaded) or 'none'} (of {', '.join(HEAVY)})"
    )


if __name__ == "__main__":
    run_command(main)
