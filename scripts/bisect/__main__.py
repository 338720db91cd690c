"""`make bisect RUN=results/x/runs/B0 [AGAINST=results/y/runs/B0] [STEP=40]`: which part of a run gives a symptom?

Steps are replayed with fixed modules, another update, or other settings. The smallest set that explains the symptom is
printed. Each replay's result is in journal.jsonl; a second call continues a search that was killed.
"""

from __future__ import annotations

import argparse
import functools

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError, run_command
from scripts.record.__main__ import enter_environment
from scripts.record.arguments import run_arguments

USAGE = "make bisect RUN=results/STUDY/runs/NAME [AGAINST=results/OTHER/runs/NAME]"
SEARCHES = ("settings", "steps", "phases", "modules")
VARIABLES = {"AGAINST": "", "STEP": "", "SYMPTOM": "", "OVER": "", "OUT": ""}
SYMPTOMS = ("nan", "spike", "differs", "rounding")


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = parse_arguments()
    enter_environment(run_record.load_given(given.run), restart)
    from scripts.bisect.bisection import bisect_run

    return bisect_run(given)


def parse_arguments() -> argparse.Namespace:
    """Parse the variables of make. UserError names a wrong one."""
    found = run_arguments("bisect", USAGE, VARIABLES, choices={"SYMPTOM": SYMPTOMS})
    found.over = tuple(found.over.split())
    for name in found.over:
        if name not in SEARCHES:
            raise UserError(f"OVER={name} is unknown; fix: use {', '.join(SEARCHES)}")
    for name, path in (("RUN", found.run), ("AGAINST", found.against)):
        if path and not (path / "run.json").exists():
            raise UserError(f"{name}={path} is not a run folder; fix: {USAGE}")
    if found.step == 0:
        raise UserError(f"STEP=0 is not a step number; fix: {USAGE}")
    return found


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
