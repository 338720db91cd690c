"""`make shrink RUN=results/x/runs/B0 [AGAINST=results/y/runs/B0]`: the smallest configuration that shows a symptom.

Ranks, layers, heads, width, sequence length and batch are reduced one after the other (section 2.2.4). Each trial
trains from the initial weights up to the step of the symptom. Its answer is in journal.jsonl, so that a second call
continues.
With AGAINST the symptom is a difference, and each trial trains the settings of both runs.
"""

from __future__ import annotations

import functools

from gpt2.artifacts import run_record
from gpt2.system.errors import run_command
from scripts.bisect.__main__ import symptom_arguments
from scripts.record.__main__ import enter_environment

USAGE = "make shrink RUN=results/STUDY/runs/NAME [AGAINST=results/OTHER/runs/NAME] [SYMPTOM=nan]"


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = symptom_arguments("shrink", USAGE, {})
    enter_environment(run_record.load_given(given.run), restart)
    from scripts.shrink.shrinking import shrink_run

    return shrink_run(given)


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
