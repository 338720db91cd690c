"""Define a suite of `make bench` and run it: check its options, print its tables, save its JSON file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.tables import ResultTable, save_result
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.system.errors import UserError


@dataclass(frozen=True)
class Given:
    """Options as typed; None or empty: not given."""

    shape: str = ""
    rounds: int | None = None
    seconds: float | None = None
    cases: str = ""

    def names(self) -> list[str]:
        """Return the Makefile's names of the options that were given."""
        values = {"SHAPE": self.shape, "ROUNDS": self.rounds, "SECONDS": self.seconds, "CASES": self.cases}
        return [name for name, value in values.items() if value not in ("", None)]


@dataclass(frozen=True)
class Options:
    """Options of one run, with the defaults of the device."""

    shape: str = ""
    rounds: int = 0
    seconds: float = 0.0
    cases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Session:
    """Where a running suite prints and saves. resolved: the device of this machine."""

    suite: str
    resolved: ResolvedTarget

    @property
    def on_cpu(self) -> bool:
        return self.resolved.device_type == "cpu"

    def say(self, line: str) -> None:
        print(line, flush=True)

    def save(self, data: Mapping[str, Any], complete: bool = False) -> None:
        """Save the data so far, so that a killed bench loses one round at most."""
        path = save_result(self.suite, self.resolved, data, complete)
        if complete:
            self.say(f"written: {path}")


@dataclass(frozen=True)
class SuiteResult:
    """data: content of the JSON file. tables and notes: printed at the end."""

    data: Mapping[str, Any]
    tables: tuple[ResultTable, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """One question that `make bench SUITE=name` answers.

    options: meaning of each option that the suite takes. rounds, seconds: defaults by kind of device ("cpu", "cuda").
    own_heap: the suite measures in this process, which needs the heap of a training process.
    """

    name: str
    help: str
    run: Callable[[Options, Session], SuiteResult]
    options: Mapping[str, str] = field(default_factory=dict)
    rounds: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    least_rounds: int = 1
    own_heap: bool = False

    def check(self, given: Given) -> None:
        """Raise UserError for an option that the suite does not take, or for too few rounds."""
        for name in given.names():
            if name not in self.options:
                takes = ", ".join(self.options) or "no option"
                raise UserError(f"suite {self.name} takes no {name}=; it takes: {takes}")
        if given.rounds is not None and given.rounds < self.least_rounds:
            raise UserError(
                f"ROUNDS={given.rounds} is too few for suite {self.name}; fix: ROUNDS={self.least_rounds} or more"
            )

    def describe(self) -> str:
        """Describe the suite and its options for --help."""
        options = [f"{'':15}{name}= {text}" for name, text in self.options.items()]
        return "\n".join([f"  {self.name:<13}{self.help}", *options])


def run_suite(suite: Suite, given: Given) -> None:
    """Run a suite on this machine, print its tables and notes, and save results/bench/SUITE.json."""
    suite.check(given)
    from gpt2.config.config import ANY_TARGET
    from gpt2.hardware import resolve

    resolved = resolve.resolve(ANY_TARGET)
    kind = resolved.device_type
    options = Options(
        given.shape,
        suite.rounds.get(kind, 0) if given.rounds is None else given.rounds,
        suite.seconds.get(kind, 0.0) if given.seconds is None else given.seconds,
        tuple(given.cases.split()),
    )
    session = Session(suite.name, resolved)
    session.say(f"{resolved.device_name}, {resolved.dtype}")
    result = suite.run(options, session)
    for block in (*result.tables, *result.notes):
        session.say(f"{block}")
    session.save(result.data, complete=True)
