"""`make bench FIRST_STEP=1`: seconds from the start of a training process to the end of its first optimizer step.

python -m scripts.bench_first_step [--rounds 5]                   prepares three studies in a temporary folder, measures
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

from bench.workers import BenchError  # noqa: E402
from gpt2.hardware.resolve import export_environment  # noqa: E402
from gpt2.system.errors import UserError, run_command  # noqa: E402
from scripts.bench import at_least, tell  # noqa: E402

GOAL_SECONDS = 20.0
SMOKE, MAIN = "gpt2-ra-ablation-smoke", "gpt2-ra-ablation"
STUDIES: tuple[tuple[str, dict[str, str]], ...] = ((SMOKE, {}), (MAIN, {}), (SMOKE, {"COMPILE": "y"}))
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
    export_environment()
    at_least(1, arguments.rounds)
    measured = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, values) in enumerate(STUDIES):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, f"kernels{number}"))  # empty at first
            told = " ".join([name, *(f"CONFIG_{symbol}={value}" for symbol, value in values.items())])
            try:
                seen = measure(Path(folder, str(number)), name, arguments.rounds, **values)
            except BenchError as error:  # such as no compiler
                tell(f"left out: {told}: {error}")
                continue
            tell(text(told, seen))
            measured += 1
    if not measured:
        raise UserError("nothing could be measured; why each study was left out stands above")
    return 0


def measure(folder: Path, name: str, rounds: int, **values: str) -> list[dict[str, Any]]:
    """One dict a round: seconds of each part, "total", which of HEAVY were loaded, and whether the study compiles.

    The study is prepared first.
    """
    from bench.temporary_studies import prepare, study_in
    from gpt2.artifacts import run_record

    fixed = {"HELLASWAG": "n", "GPT2_MAX_TIME": "0", "GPT2_MAX_ITERS": "20", "DATA_DIR": str(folder / "data")}
    study = study_in(folder, name, **fixed | values)
    prepare(study)
    variant, seen = study.settings.variants[0], []
    for number in range(rounds):
        run_dir = study.directory / "runs" / run_record.run_name(variant, number)
        run_dir.mkdir(parents=True)
        start = one_start([str(study.directory), variant, str(number)], run_dir / "log.txt")
        seen.append(start | {"compiles": study.config.target.compile})
    return seen


def one_start(arguments: list[str], log: Path) -> dict[str, Any]:
    """Start a training process as the study does, and hear its parts."""
    from study.runner.child_process import Child

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
    from gpt2.train import trainer
    from ra import variants  # noqa: F401  (what scripts.train imports for a run)
    from scripts import train as script
    from study.runner import plan  # noqa: F401

    marks = [ENTERED, time.monotonic()]

    def marked(function: Callable[..., Any], before: bool, after: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if before:
                marks.append(time.monotonic())
            value = function(*arguments, **named)
            if after:
                trainer.device_synchroniser(arguments[0].device)()
                marks.append(time.monotonic())
            return value

        return call

    def first_step(*arguments: Any, **named: Any) -> None:
        marked(step, True, True)(*arguments, **named)
        loaded = [name for name in HEAVY if name in sys.modules]
        print(json.dumps({"event": EVENT, "marks": marks, "loaded": loaded}), flush=True)
        os._exit(0)

    step = trainer.Stepper.step
    trainer.Stepper.__init__ = marked(trainer.Stepper.__init__, True, True)  # type: ignore[method-assign]
    trainer.Stepper.step = first_step  # type: ignore[method-assign,assignment]
    return script.main()


def text(name: str, seen: list[dict[str, Any]]) -> str:
    """Medians of the parts and the total's spread, against the goal; a first process that compiles is told apart."""
    compiling, seen = (seen[:1], seen[1:]) if seen[0]["compiles"] and len(seen) > 1 else ([], seen)
    parts = ", ".join(f"{part} {median(row[part] for row in seen):.2f}" for part in PARTS)
    totals = [row["total"] for row in seen]
    loaded = sorted({module for row in [*compiling, *seen] for module in row["loaded"]})
    lines = [
        f"{name}: first step after {median(totals):.2f} s [{min(totals):.2f}, {max(totals):.2f}], median of "
        f"{len(seen)} (goal: {GOAL_SECONDS:g} s)",
        f"  seconds: {parts}",
        f"  heavy packages loaded: {', '.join(loaded) or 'none'} (of {', '.join(HEAVY)})",
    ]
    lines += [
        f"  these had the kernels that a process before them compiled: its first step came after {row['total']:.2f} s"
        for row in compiling
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
