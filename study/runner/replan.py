"""A plan that a study's first steps show to be wrong, since the machine was busy when they were timed.

Steps cannot be faster than the machine: where they take much less than when they were timed, it was busy then. As long
as nothing else was saved, the plan is made anew and the run begun again. Steps that take longer change nothing: what
keeps the machine busy now may pass, and the training clock ends such a run in time.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

from gpt2.artifacts import run_record
from study.analysis.timing import EARLY
from study.runner.plan import SAME_SPEED

LOOK_SHARE, LOOK_LEAST, LOOK_MOST = 0.1, 2.0, 60.0  # seconds of training before the look, from the time limit
LEAST_STEPS = 5  # between the first event and the last of those that are looked at
MOST_REPLANS = 2  # times that a study is planned anew
SET_ASIDE = "set-aside"  # beside runs/: what was begun by a plan that does not stand


def look_at(limit: float) -> float:
    """Seconds of training after which a run's steps are held against the plan."""
    return min(max(LOOK_SHARE * limit, LOOK_LEAST), LOOK_MOST)


class Watch:
    """The steps of a run beside their timing in the plan. waiting: whether it may still find the plan wrong."""

    def __init__(self, name: str, variant: str, plan: dict[str, Any]) -> None:
        self.name = name
        self.planned: float = plan["classes"][plan["variants"][variant]["class"]]["seconds_per_iteration"]
        self.look = max(look_at(plan["budget"]["max_time_seconds"]), self.planned)
        self.first: dict[str, Any] | None = None  # event with a step on the training clock
        self.waiting = True

    def hear(self, event: dict[str, Any]) -> str:
        """Why the plan is to be made anew, at the event that shows it; empty at all others."""
        if not self.waiting or event["event"] != "train" or not event["tokens_per_second"]:
            return ""
        if self.first is None:
            self.first = event
            self.waiting = (
                event["train_seconds"] < 2 * self.look
            )  # else on from a checkpoint: too much to give up
            if not self.waiting:
                return ""
        made = event["iteration"] - self.first["iteration"]
        soon = event["train_seconds"] < self.look and 2 * event["iteration"] < event["iterations"]
        self.waiting = soon or made < LEAST_STEPS
        if self.waiting:
            return ""
        seen = (event["train_seconds"] - self.first["train_seconds"]) / made
        if seen >= EARLY * self.planned:
            return ""
        return (
            f"planned anew after the first steps of {self.name}, which took {seen:.3g} s each: when they were timed "
            f"for the plan, they took {self.planned:.3g} s, on a machine that was busy with something else"
        )


def watch(study_dir: Path, plan: dict[str, Any], variant: str, seed: int) -> Watch | None:
    """What looks at the first run of a study whose counts a time limit decides; None at any other run."""
    limit = plan["budget"]["max_time_seconds"]
    if not limit or "extended" in plan or plan.get("planned_anew", 0) >= MOST_REPLANS:
        return None
    rows, classes = plan["variants"].values(), plan["classes"]
    if any(row["class"] not in classes for row in rows):
        return None
    # with one step more than its count, which is rounded down, the slowest variant would pass the limit
    longest = max(classes[row["class"]]["seconds_per_iteration"] * (row["iterations"] + 1) for row in rows)
    counted = (1 + plan.get("margin", 0.0)) * longest
    name = run_record.run_name(variant, seed)
    if SAME_SPEED * counted < limit or _saved(study_dir, name, look_at(limit)):
        return None
    return Watch(name, variant, plan)


def _saved(study_dir: Path, name: str, look: float) -> bool:
    """Whether there is more to lose than `look` seconds of run `name`: a finished run, another's checkpoint."""
    for folder in (study_dir / "runs").glob("*/"):
        status, spent = "", 0.0
        with contextlib.suppress(run_record.RecordError):
            seen = run_record.load(folder)
            status, spent = seen["status"], (seen["progress"] or {}).get("train_seconds", 0.0)
        begun = any(any((folder / kind).glob("*")) for kind in run_record.CHECKPOINTS)
        if status == "finished" or (begun and (folder.name != name or spent >= look)):
            return True
    return False


def set_aside(study_dir: Path, name: str) -> None:
    """Take what there is of a run out of runs/, at once; its checkpoints are deleted."""
    number, aside = 1, study_dir / SET_ASIDE
    while (aside / f"{name}-{number}").exists():
        number += 1
    aside.mkdir(exist_ok=True)
    (study_dir / "runs" / name).rename(aside / f"{name}-{number}")
    tidy(study_dir)


def tidy(study_dir: Path) -> None:
    """Delete the checkpoints of runs that were set aside, which no plan goes on from."""
    for kind in run_record.CHECKPOINTS:
        for path in (study_dir / SET_ASIDE).glob(f"*/{kind}"):
            shutil.rmtree(path, ignore_errors=True)


def anew(plan: dict[str, Any], made: dict[str, Any], reason: str) -> None:
    """Give the plan the content of one that was made now, with the reason on record, unless steps now take longer."""
    notes = [*plan["notes"], reason]
    before, now = (
        sum(of["classes"][cost]["seconds_per_iteration"] for cost in made["classes"]) for of in (plan, made)
    )
    if now < before:
        notes += [note for note in made["notes"] if note not in notes]
        plan |= made
    else:
        notes.append("timed again, they took longer still: the plan stands")
    plan |= {"planned_anew": plan.get("planned_anew", 0) + 1, "notes": notes}
