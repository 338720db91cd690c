"""The table of faults, and what each of them is given to work with.

A fault is a function that really does the harm, in processes of its own, and says in words what it saw. It is as
expected where those are the words that the table expects.
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

from tests.faults.workplace import ROOT, Workplace, injected, wait_for, write_stories


class CannotDoError(Exception):
    """This machine does not allow the harm to be done: the row says so and counts as neither good nor bad."""


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
    """Put a function into the table."""

    def enter(inflict: Callable[[Bench], str]) -> Callable[[Bench], str]:
        TABLE.append(Fault(name, expected, inflict, quick))
        return inflict

    return enter


def outcome(good: bool, expected: str, otherwise: str) -> str:
    """The expected words, or what was seen in their place."""
    return expected if good else f"NOT SO: {' '.join(otherwise.split())}"


class Bench:
    """Fresh workplaces, the numbers of undisturbed studies (made once each), and a few tools."""

    long = {"GPT2_MAX_ITERS": "500", "EVAL_INTERVAL_TOKENS": "6400"}  # noqa: RUF012
    hellaswag = ROOT / "tests" / "fixtures" / "hellaswag_small.jsonl"

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.texts = write_stories(folder / "texts")
        self.random = random.Random(seed)
        self.slow = injected(None)
        self._made = 0
        self._undisturbed: dict[str, dict[str, Any]] = {}

    def workplace(self, **changes: str) -> Workplace:
        """A new folder with the study configured, and the data prepared before, which all share."""
        self._made += 1
        shared = {"DATA_DIR": str(self.folder / "data")} | changes
        return Workplace(self.folder / f"place-{self._made:03d}", self.texts, **shared)

    def undisturbed(self, name: str = "B0", **changes: str) -> dict[str, Any]:
        """The numbers of `name` in a study with these settings that nothing happens to."""
        key = json.dumps([name, changes], sort_keys=True)
        if key not in self._undisturbed:
            place = self.workplace(**changes)
            done = place.command("scripts.study")
            assert done.returncode == 0, done.stdout
            self._undisturbed[key] = place.numbers(name)
        return self._undisturbed[key]

    def kill_all(self, place: Workplace, process: subprocess.Popen[str]) -> None:
        """SIGKILL to the study and to whatever it started."""
        process.kill()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (path / "cwd").resolve() == place.folder.resolve() and int(path.name) != os.getpid():
                    os.kill(int(path.name), signal.SIGKILL)
            except OSError:
                continue
        process.communicate()
        wait_for(lambda: not place.orphans())


def in_namespace() -> tuple[str, ...]:
    """What a command is prefixed with to be allowed to mount a file system of its own."""
    prefix = (
        ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")
    )
    if not shutil.which("unshare"):
        raise CannotDoError("there is no unshare here")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        raise CannotDoError("this machine allows no mount of one's own")
    return prefix
