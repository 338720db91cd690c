"""One line of `make card`: what was expected, what was measured, and the verdict. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.resolve import ResolvedTarget

PASS, DIFFERS, NOT_RUN = "pass", "differs", "not run"


class NotRunError(Exception):
    """A check cannot run here. Its text is the reason."""


@dataclass(frozen=True)
class CardCheck:
    """measured: for a check that was not run, the reason."""

    name: str
    expected: str
    measured: str
    verdict: str

    @property
    def line(self) -> str:
        found = "reason" if self.verdict == NOT_RUN else "measured"
        return f"{self.verdict:<8} {self.name}: expected {self.expected}; {found}: {self.measured}"


@dataclass(frozen=True)
class CheckedDevice:
    """The device to check, and an empty folder for studies."""

    resolved: ResolvedTarget
    folder: Path

    @property
    def on_cpu(self) -> bool:
        return self.resolved.device == "cpu"


Question = Callable[[CheckedDevice], Iterator[CardCheck]]


def judge(name: str, expected: str, measured: str, good: bool, reason: str = "") -> CardCheck:
    """Return the verdict on a measurement. reason: why it cannot be judged here, else empty."""
    return (
        not_run(name, expected, reason)
        if reason
        else CardCheck(name, expected, measured, PASS if good else DIFFERS)
    )


def not_run(name: str, expected: str, reason: str) -> CardCheck:
    return CardCheck(name, expected, reason, NOT_RUN)
