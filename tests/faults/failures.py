"""Faults of the run itself: memory that runs out, values that are not finite."""

from __future__ import annotations

import math
from typing import Any

from tests.faults.harness import Bench, fault, outcome

BOTH = {"VARIANTS": "B RALEARN", "GPT2_MAX_ITERS": "30", "SLOTS": "1"}
FALLS = (
    "micro-batch 2 -> 1 for this run and the next, effective batch 4, losses as undisturbed, in the report"
)


def close(one: list[Any], other: list[Any]) -> bool:
    """Return whether losses at the same iterations agree to float32 rounding in another order of summation."""
    return len(one) == len(other) and all(
        a[0] == b[0] and math.isclose(a[-1], b[-1], rel_tol=1e-4) for a, b in zip(one, other, strict=True)
    )


def fell_back(bench: Bench, at: int, names: tuple[str, ...], **changes: str) -> str:
    place = bench.workplace(**changes)
    done = place.make({"place": "step", "at": at, "action": "oom", "above": 1, "times": 0})
    if done.returncode:
        return f"exit status {done.returncode}: {done.stdout[-300:]}"
    batches = [place.plan()["batch"], *(place.record(name)["batch"] for name in names)]
    exact = all((b["micro"], b["accumulation"], b["effective"]) == (1, 4, 4) for b in batches)
    same = all(
        close(place.numbers(name)["losses"], bench.undisturbed(name, **changes)["losses"]) for name in names
    )
    reported = "ran out of memory at micro-batch 2" in (place.study / "report.md").read_text()
    return outcome(exact and same and reported, FALLS, f"exact {exact}, same {same}, reported {reported}")


@fault("out of memory at the first micro-batch", FALLS, quick=True)
def oom_at_once(bench: Bench) -> str:
    return fell_back(bench, 0, ("B0",))


@fault("out of memory in the middle of a run", FALLS)
def oom_in_the_middle(bench: Bench) -> str:
    return fell_back(bench, 25, ("B0", "RALEARN0"), **BOTH)


@fault("out of memory at every micro-batch", "the run fails by name, the others go on, exit status 1")
def oom_for_good(bench: Bench) -> str:
    place = bench.workplace(**BOTH)
    done = place.make({"place": "step", "at": 10, "action": "oom", "above": 0, "times": 2})
    found = (place.status("B0"), place.status("RALEARN0"), done.returncode)
    good = found == ("failed", "finished", 1) and "out of memory at micro-batch 1" in str(
        place.record("B0")["error"]
    )
    return outcome(
        good, "the run fails by name, the others go on, exit status 1", f"{found} {done.stdout[-200:]}"
    )


HALVES = "half as much is scored at once, on record; the run ends at the undisturbed numbers"


def halved(bench: Bench, injection: dict[str, Any], **changes: str) -> str:
    place = bench.workplace(**changes)
    done = place.make(injection | {"action": "oom", "times": 0})
    noted = any("evaluation ran out of memory" in note for note in place.record()["notes"])
    mine, other = place.numbers(), bench.undisturbed(**changes)
    same = mine["losses"] == other["losses"] and close(mine["validation"], other["validation"])
    return outcome(done.returncode == 0 and noted and same, HALVES, done.stdout[-300:])


@fault("out of memory in validation", HALVES)
def oom_in_validation(bench: Bench) -> str:
    return halved(bench, {"place": "evaluate", "above": 3})


@fault("out of memory in HellaSwag", HALVES)
def oom_in_hellaswag(bench: Bench) -> str:
    changes = {"HELLASWAG": "y", "HELLASWAG_FILE": str(bench.hellaswag), "HELLASWAG_LIMIT": "12"}
    return halved(bench, {"place": "hellaswag", "above": 512}, **changes)


REPEATABLE = (
    "stopped before the optimizer, tried once more, on record as repeatable with micro-batch and data; "
    "the last good checkpoint stays; the other runs go on"
)


@fault("a loss that is NaN whenever it is computed", REPEATABLE)
def nan_for_good(bench: Bench) -> str:
    place = bench.workplace(**BOTH)
    done = place.make({"place": "loss", "only": 25, "action": "nan", "times": 6})
    record = place.record("B0")
    faults = record["faults"]
    good = (
        record["status"] == "failed"
        and len(faults) == 1
        and faults[0]["repeated"] is True
        and faults[0]["iteration"] == 25
        and faults[0]["what"] == "loss"
        and faults[0]["micro_batch"] == 0
        and len(faults[0]["sequences"]) == 2
        and "repeatable" in str(record["error"])
        and place.checkpoints("B0") != []
        and all(int(path.name) <= 25 for path in place.checkpoints("B0"))
        and place.status("RALEARN0") == "finished"
        and done.returncode == 1
        and "repeatable" in (place.study / "report.md").read_text()
    )
    return outcome(good, REPEATABLE, f"{record['status']} {faults} {record['error']} {done.stdout[-300:]}")


PASSING = "retried from the checkpoint, ends at the undisturbed numbers, recorded as a transient fault"


@fault("a loss that is NaN once", PASSING, quick=True)
def nan_once(bench: Bench) -> str:
    place = bench.workplace()
    done = bench.make(place, {"place": "loss", "only": 28, "action": "nan", "times": 1})
    record = place.record()
    same = place.numbers() == bench.undisturbed()
    reported = "transient fault" in (place.study / "report.md").read_text()
    good = done.returncode == 0 and same and reported and [f["repeated"] for f in record["faults"]] == [False]
    return outcome(
        good, PASSING, f"same {same}, reported {reported}, {record['faults']} {done.stdout[-300:]}"
    )


@fault("a loss spike", "trained through and put on record with what was to be expected")
def spike(bench: Bench) -> str:
    place = bench.workplace(LEARNING_RATE="1e-6")
    done = place.make({"place": "loss", "only": 28, "action": "spike", "times": 0})
    spikes = place.record()["spikes"]
    reported = "loss spike" in (place.study / "report.md").read_text()
    good = (
        done.returncode == 0
        and reported
        and [row[0] for row in spikes] == [29]
        and spikes[0][1] > spikes[0][2]
    )
    return outcome(
        good,
        "trained through and put on record with what was to be expected",
        f"{spikes} {done.stdout[-200:]}",
    )
