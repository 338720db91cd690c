"""Faults of a run over two processes: signals and SIGKILL to one of them, one that hangs, one that differs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from tests.faults.harness import Bench, fault, outcome
from tests.faults.signals import SAME, after_resuming
from tests.faults.workplace import PATIENCE_SECONDS, Workplace, wait_for

TWO = {"RANKS": "2"}
LAUNCHER = "launcher"


def processes(place: Workplace) -> dict[str, int]:
    """Return the processes of the run: "0" and "1", and the launcher."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes()
            if b"scripts.train" in words and (path / "cwd").resolve() == place.folder.resolve():
                variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                pairs = dict(pair.partition("=")[::2] for pair in variables)
                found[pairs.get("RANK", LAUNCHER)] = int(path.name)
    return found


def signalled(bench: Bench, number: int, name: str, **changes: str) -> tuple[Workplace, int, str]:
    """Send a signal to the study ("study"), or to a process of its run. Return the place, exit status and output."""
    place = bench.workplace(**TWO, **changes)
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 15)
    os.kill(process.pid if name == "study" else processes(place)[name], number)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    wait_for(lambda: not place.orphans())
    return place, process.returncode, output


def resumed(bench: Bench, place: Workplace, before: str) -> str:
    return after_resuming(bench, place, before, **TWO)


@fault("two ranks: SIGTERM to the study, and so to both", SAME)
def term_to_all(bench: Bench) -> str:
    place, status, output = signalled(bench, signal.SIGTERM, "study")
    good = status == 130 and place.status() == "interrupted"
    return resumed(bench, place, "interrupted and saved" if good else f"{status} {output[-300:]}")


@fault("two ranks: SIGTERM to one", SAME)
def term_to_one(bench: Bench) -> str:
    place, status, output = signalled(bench, signal.SIGTERM, "1")
    good = status == 1 and place.status() == "interrupted"
    return resumed(bench, place, "interrupted and saved" if good else f"{status} {output[-300:]}")


RETRIED = "named, and retried from the last checkpoint; ends at the undisturbed numbers; no process left"


def retried(bench: Bench, number: int, name: str, reason: str, **changes: str) -> str:
    """Lose a process of the run. The same `make` names the reason, retries the run and ends it."""
    place, status, output = signalled(bench, number, name, **changes)
    named = any(
        reason in line and "; retrying from its last checkpoint" in line for line in output.splitlines()
    )
    same = not status and place.numbers() == bench.undisturbed(**TWO)
    return outcome(named and same and not place.orphans(), RETRIED, f"{status} {output[-600:]}")


@fault("two ranks: SIGKILL of the first", RETRIED)
def kill_first(bench: Bench) -> str:
    return retried(bench, signal.SIGKILL, "0", "rank 0 was ended by SIGKILL")


@fault("two ranks: SIGKILL of the second", RETRIED)
def kill_second(bench: Bench) -> str:
    return retried(bench, signal.SIGKILL, "1", "rank 1 was ended by SIGKILL")


@fault("two ranks: SIGKILL of their launcher", RETRIED)
def kill_launcher(bench: Bench) -> str:
    return retried(bench, signal.SIGKILL, LAUNCHER, "killed by SIGKILL")


@fault("two ranks: one hangs (SIGSTOP)", RETRIED)
def hangs(bench: Bench) -> str:
    return retried(bench, signal.SIGSTOP, "1", "CONFIG_RANKS_TIMEOUT", RANKS_TIMEOUT="5")


def refused(bench: Bench, action: str, message: str) -> str:
    place = bench.workplace(**TWO)
    place.make({"place": "start", "rank": 1, "action": action})
    wait_for(lambda: not place.orphans())
    error = str(place.record()["error"])
    named = message in error and not place.steps()
    return resumed(bench, place, "refused before the first step" if named else error)


REFUSED = "refused before the first step; `make` ends at the undisturbed numbers; no process left"


@fault("two ranks: one has another version of torch", REFUSED)
def other_torch(bench: Bench) -> str:
    return refused(bench, "torch", "rank 1 has torch 2.0.0, rank 0 has torch ")


@fault("two ranks: one has other data", REFUSED)
def other_data(bench: Bench) -> str:
    return refused(bench, "data", "rank 1 has data 0000")


FALLS = "all go on with micro-batch 1, effective batch 4, and end at the numbers of an undisturbed run of it"


@fault("two ranks: one runs out of memory", FALLS)
def out_of_memory(bench: Bench) -> str:
    return exhausted(bench, **TWO)


def exhausted(bench: Bench, **changes: str) -> str:
    place = bench.workplace(**changes)
    injection: dict[str, Any] = {"place": "forward", "rank": 1, "action": "oom", "above": 1, "times": 0}
    done = place.make(injection)
    batch = place.record()["batch"]
    exact = not done.returncode and (batch["micro"], batch["accumulation"], batch["effective"]) == (1, 2, 4)
    same = place.numbers() == bench.undisturbed(**changes, MICRO_BATCH="1")
    return outcome(exact and same, FALLS, f"exact {exact}, same {same}, {done.stdout[-300:]}")
