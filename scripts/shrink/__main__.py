"""`make shrink RUN=results/x/runs/B0 [AGAINST=results/y/runs/B0]`: the smallest configuration that shows a symptom.

Ranks, layers, heads, width, sequence length and batch are reduced one after the other (section 2.2.4). Each trial
trains from the initial weights up to the step of the symptom. Its answer is in journal.jsonl, so that a second call
continues.
With AGAINST the symptom is a difference, and each trial trains the settings of both runs.
"""

from __future__ import annotations

import argparse
import functools

from gpt2.artifacts import run_record
from gpt2.system.errors import UserError, run_command
from kconfig.arguments import command_arguments
from scripts.bisect.__main__ import check_run
from scripts.record.__main__ import enter_environment

USAGE = "make shrink RUN=results/STUDY/runs/NAME [AGAINST=results/OTHER/runs/NAME] [SYMPTOM=nan]"


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = parse_arguments()
    enter_environment(run_record.load_given(given.run), restart)
    from numerics.errors import NumericsError
    from scripts.shrink.shrinking import shrink_run

    try:
        return shrink_run(given)
    except NumericsError as error:
        raise UserError(str(error)) from error


def parse_arguments() -> argparse.Namespace:
    """Parse the variables of make. UserError names a wrong one."""
    parser = argparse.ArgumentParser(prog="scripts.shrink")
    for name in ("run", "against", "step", "symptom", "out"):
        parser.add_argument(f"--{name}", default="")
    found = parser.parse_args(command_arguments(("RUN", "AGAINST", "STEP", "SYMPTOM", "OUT")))
    check_run(found, USAGE)
    return found


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
