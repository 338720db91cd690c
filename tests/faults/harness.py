"""The table of faults and the tools that they share.

A fault is a function that disturbs a study in separate processes and returns the outcome in words. It is as expected
where these are the words of the table.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.in_process import train
from tests.faults.workplace import PATIENCE_SECONDS, ROOT, Workplace, injected, wait_for, write_stories


class CannotDoError(Exception):
    """The fault cannot be injected on this machine. Its row counts as neither good nor bad."""


@dataclass(frozen=True)
class Fault:
    """A row of the table. quick: part of `make check`."""

    name: str
    expected: str
    inflict: Callable[[Bench], str]
    quick: bool


TABLE: list[Fault] = []


def fault(
    name: str, expected: str, quick: bool = False
) -> Callable[[Callable[[Bench], str]], Callable[[Bench], str]]:
    """Add a function to the table."""

    def add(inflict: Callable[[Bench], str]) -> Callable[[Bench], str]:
        TABLE.append(Fault(name, expected, inflict, quick))
        return inflict

    return add


def outcome(good: bool, expected: str, otherwise: str) -> str:
    """Return the expected words, or the details of another outcome."""
    return expected if good else f"NOT SO: {' '.join(otherwise.split())}"


class Bench:
    """New workplaces, and undisturbed studies that are run once each.

    in_process: a `make` after the fault trains in this process, and so does one whose loss is NaN.
    """

    long = {"GPT2_MAX_ITERS": "500", "EVAL_INTERVAL_TOKENS": "3200"}  # noqa: RUF012
    hellaswag = ROOT / "tests" / "fixtures" / "hellaswag_small.jsonl"

    def __init__(self, folder: Path, seed: int = 0, in_process: bool = False) -> None:
        self.folder = folder
        self.texts = write_stories(folder / "texts")
        self.in_process = in_process
        self.random = random.Random(seed)
        self.slow = injected(None)
        self._workplaces = 0
        self._studies: dict[str, Workplace] = {}

    def workplace(self, **changes: str) -> Workplace:
        """Return a new folder with a configured study. All share the prepared data."""
        self._workplaces += 1
        shared = {"DATA_DIR": str(self.folder / "data")} | changes
        return Workplace(self.folder / f"place-{self._workplaces:03d}", self.texts, **shared)

    def undisturbed(self, name: str = "B0", **changes: str) -> dict[str, Any]:
        """Return the numbers of a run in an undisturbed study with these settings."""
        return self._study(None, changes).numbers(name)

    def finished(self) -> Workplace:
        """Return a copy of the undisturbed study with default settings."""
        return self._copy(self._study(None, {}))

    def interrupted(self) -> Workplace:
        """Return a copy of a study that was interrupted late enough for two checkpoints."""
        return self._copy(self._study({"place": "step", "at": 32, "action": "TERM"}, {}))

    def _study(self, fault: dict[str, Any] | None, changes: dict[str, str]) -> Workplace:
        """Run a study with these settings once."""
        key = json.dumps([fault, changes], sort_keys=True)
        if key not in self._studies:
            place = self.workplace(**changes)
            done = place.make(fault) if fault else train(place)
            assert done.returncode == (130 if fault else 0), done.stdout
            self._studies[key] = place
        return self._studies[key]

    def _copy(self, study: Workplace) -> Workplace:
        place = self.workplace()
        shutil.copytree(study.folder / "results", place.folder / "results")
        return place

    def make(self, place: Workplace, fault: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `make` after the fault, or with one that sends no signal. Returns its status and its output."""
        return train(place, fault) if self.in_process else place.make(fault)

    def kill_all(self, place: Workplace, process: subprocess.Popen[str]) -> None:
        """Send SIGKILL to the study and to its processes."""
        process.kill()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (path / "cwd").resolve() == place.folder.resolve() and int(path.name) != os.getpid():
                    os.kill(int(path.name), signal.SIGKILL)
            except OSError:
                continue
        process.communicate(timeout=PATIENCE_SECONDS)
        wait_for(lambda: not place.orphans())


def in_namespace() -> tuple[str, ...]:
    """Return the prefix of a command that may mount a private file system."""
    prefix = (
        ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
    )
    if not shutil.which("unshare"):
        raise CannotDoError("there is no unshare here")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        raise CannotDoError("this machine does not allow private mounts")
    return prefix
