"""`make bisect RUN=results/x/runs/B0 [AGAINST=results/y/runs/B0] [STEP=40]`: which part of a run gives a symptom?

Steps are replayed with fixed modules, another update, or other settings. The smallest set that explains the symptom is
printed. Each replay's result is in journal.jsonl; a second call continues a search that was killed.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError, run_command
from kconfig.arguments import command_arguments
from scripts.record.__main__ import enter_environment

USAGE = "make bisect RUN=results/STUDY/runs/NAME [AGAINST=results/OTHER/runs/NAME]"
SEARCHES = ("settings", "steps", "phases", "modules")
SYMPTOMS = ("nan", "spike", "differs", "rounding")


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = parse_arguments()
    record = run_record.load_given(given.run)
    enter_environment(record, restart)
    from numerics.errors import NumericsError
    from scripts.bisect.bisection import bisect_run

    try:
        return bisect_run(given)
    except NumericsError as error:
        raise UserError(str(error)) from error


def parse_arguments() -> argparse.Namespace:
    """Parse the variables of make. UserError names a wrong one."""
    parser = argparse.ArgumentParser(prog="scripts.bisect")
    for name in ("run", "against", "step", "symptom", "over", "out"):
        parser.add_argument(f"--{name}", default="")
    found = parser.parse_args(command_arguments(("RUN", "AGAINST", "STEP", "SYMPTOM", "OVER", "OUT")))
    found.over = tuple(found.over.split())
    check_run(found, USAGE)
    for name in found.over:
        if name not in SEARCHES:
            raise UserError(f"OVER={name} is unknown; fix: use {', '.join(SEARCHES)}")
    return found


def check_run(found: argparse.Namespace, usage: str) -> None:
    """Convert RUN, AGAINST, STEP and OUT, and check SYMPTOM. UserError names a wrong one."""
    if not found.run:
        raise UserError(f"RUN is missing; fix: {usage}")
    found.run = Path(found.run)
    if not (found.run / "run.json").exists():
        raise UserError(f"RUN={found.run} is not a run folder; fix: {usage}")
    found.against = Path(found.against) if found.against else None
    if found.against and not (found.against / "run.json").exists():
        raise UserError(f"AGAINST={found.against} is not a run folder; fix: {usage}")
    if found.step and not (found.step.isascii() and found.step.isdigit() and int(found.step)):
        raise UserError(f"STEP={found.step} is not a step number; fix: {usage}")
    found.step = int(found.step) if found.step else None
    if found.symptom and found.symptom not in SYMPTOMS:
        raise UserError(f"SYMPTOM={found.symptom} is unknown; fix: use {', '.join(SYMPTOMS)}")
    found.out = Path(found.out) if found.out else None
    if found.out and found.out.resolve().is_relative_to(found.run.resolve()):
        raise UserError(
            f"OUT={found.out} is in the run's folder, which stays as it is; fix: OUT=another folder"
        )


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
