"""`make bisect RUN=results/x/runs/B0 [AGAINST=results/y/runs/B0] [STEP=40]`: which part of a run gives a symptom?

Steps are replayed with fixed modules, another update, or other settings. The smallest set that explains the symptom is
printed. Each replay's result is in journal.jsonl; a second call continues a search that was killed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError, run_command
from scripts.record.__main__ import enter_environment
from scripts.record.arguments import run_arguments

USAGE = "make bisect RUN=results/STUDY/runs/NAME [AGAINST=results/OTHER/runs/NAME]"
SEARCHES = ("settings", "steps", "phases", "modules")
SYMPTOMS = ("nan", "spike", "differs", "rounding")


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = parse_arguments()
    enter_environment(run_record.load_given(given.run), restart)
    from scripts.bisect.bisection import bisect_run

    return bisect_run(given)


def parse_arguments() -> argparse.Namespace:
    """Parse the variables of make. UserError names a wrong one."""
    found = symptom_arguments("bisect", USAGE, {"OVER": ""})
    found.over = tuple(found.over.split())
    for name in found.over:
        if name not in SEARCHES:
            raise UserError(f"OVER={name} is unknown; fix: use {', '.join(SEARCHES)}")
    return found


def symptom_arguments(program: str, usage: str, others: Mapping[str, str]) -> argparse.Namespace:
    """Parse RUN, AGAINST, STEP, SYMPTOM, OUT, and other variables with their defaults. UserError names a wrong one."""
    variables = {"AGAINST": "", "STEP": "", "SYMPTOM": "", **others, "OUT": ""}
    found = run_arguments(program, usage, variables, choices={"SYMPTOM": SYMPTOMS})
    for name, path in (("RUN", found.run), ("AGAINST", found.against)):
        if path and not (path / "run.json").exists():
            raise UserError(f"{name}={path} is not a run folder; fix: {usage}")
    if found.step == 0:
        raise UserError(f"STEP=0 is not a step number; fix: {usage}")
    return found


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
