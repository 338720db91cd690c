"""A plan that a study's first steps show to be wrong, since the machine was busy when they were timed.

Steps that take much less than they took when they were timed cannot be the plan's doing: no machine is faster than
it is. As long as nothing was saved, the plan is made anew and the run begun again. Steps that take longer change
nothing: what keeps the machine busy now may pass, and the training clock ends such a run in time.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from gpt2 import record
from study.timing import EARLY

LOOK_SHARE, LOOK_LEAST, LOOK_MOST = 0.1, 2.0, 60.0  # seconds of training before the look, from the time limit
LEAST_STEPS = 5  # that were told; fewer say nothing
MOST = 2  # times that a study is planned anew


class Watch:
    """The steps of a run beside their timing in the plan. waiting: whether nothing was found out so far."""

    def __init__(self, name: str, variant: str, plan: dict[str, Any]) -> None:
        self.name = name
        self.planned: float = plan["classes"][plan["variants"][variant]["class"]]["seconds_per_iteration"]
        self.tokens: int = plan["batch"]["effective"] * plan["batch"]["block_size"]
        self.limit: float = plan["budget"]["max_time_seconds"]
        self.steps: list[float] = []  # seconds
        self.waiting = True

    def hear(self, event: dict[str, Any]) -> str:
        """Why the plan is to be made anew, at the event that shows it; empty at all others."""
        if not self.waiting or event.get("event") != "train" or not event.get("tokens_per_second"):
            return ""
        self.steps.append(self.tokens / event["tokens_per_second"])
        look = min(max(LOOK_SHARE * self.limit, LOOK_LEAST), LOOK_MOST)
        enough = event["train_seconds"] >= look or 2 * event["iteration"] >= event["iterations"]
        if not enough or len(self.steps) < LEAST_STEPS:
            return ""
        self.waiting = False
        seen = statistics.median(self.steps)
        if seen >= EARLY * self.planned:
            return ""
        return (
            f"planned anew after the first steps of {self.name}, which took {seen:.3g} s each: when they were timed "
            f"for the plan, they took {self.planned:.3g} s, on a machine that was busy with something else"
        )


def watch(study_dir: Path, plan: dict[str, Any], variant: str, seed: int) -> Watch | None:
    """What looks at the first run of a study whose counts a time limit decides; None at any other run."""
    row = plan["variants"][variant]
    limit = plan.get("budget", {}).get("max_time_seconds")
    timed = plan.get("classes", {}).get(row.get("class"))
    if not limit or not timed or plan.get("planned_anew", 0) >= MOST or not _untouched(study_dir):
        return None
    bound = max(
        plan["classes"][own["class"]]["seconds_per_iteration"] * own["iterations"]
        for own in plan["variants"].values()
    )
    return Watch(record.run_name(variant, seed), variant, plan) if bound >= EARLY * limit else None


def _untouched(study_dir: Path) -> bool:
    """Whether no run has saved anything yet: none is finished, none has a checkpoint."""
    runs = study_dir / "runs"
    saved = [path for name in ("checkpoint", "stable") for path in runs.glob(f"*/{name}/*")]
    return not saved and not any(_finished(path) for path in runs.glob("*/run.json"))


def _finished(path: Path) -> bool:
    try:
        return json.loads(path.read_bytes()).get("status") == "finished"
    except (OSError, ValueError, AttributeError):
        return False


def anew(plan: dict[str, Any], made: dict[str, Any], reason: str) -> None:
    """Give the plan the content of one that was made now, with the reason on record."""
    count, told = plan.get("planned_anew", 0) + 1, [*plan["notes"], reason]
    plan.clear()
    plan |= made | {
        "planned_anew": count,
        "notes": [*told, *(note for note in made["notes"] if note not in told)],
    }
