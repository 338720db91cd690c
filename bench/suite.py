"""Define a suite of `make bench` and run it: check its options, print its tables, save its JSON file."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from referee.pages.document import align_columns
from runtime import resolve
from runtime import settings as config
from runtime.errors import UserError
from runtime.files import write_json
from runtime.provenance import environment_record

FEW = 6  # rounds from which a median has a 95 % interval within their range
INTERVAL = f"95 % interval; below {FEW} rounds the range"

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]  # head -> text of a row's cell


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return median, least, most, and the interval of the median (low, high); None for no values.

    The interval is that of the order statistics (an inverted sign test) with 95 % coverage or a little more, for
    independent rounds. Below FEW rounds it is the range.
    """
    if not values:
        return None
    ordered, n = sorted(values), len(values)
    rank, below = 0, 0.0
    while rank < n // 2 and (below := below + math.comb(n, rank) / 2**n) <= 0.025:
        rank += 1
    outside = max(rank - 1, 0)  # values on either side that lie outside the interval
    low, high = ordered[outside], ordered[n - 1 - outside]
    return {"median": median(values), "low": low, "high": high, "least": ordered[0], "most": ordered[-1]}


def format_spread(value: Mapping[str, float] | None, form: str = ".2f", scale: float = 1.0) -> str:
    """Write a spread as "1.12 [1.05, 1.19]"; "-" for None."""
    if value is None:
        return "-"
    middle, low, high = (f"{value[key] * scale:{form}}" for key in ("median", "low", "high"))
    return f"{middle} [{low}, {high}]"


def format_ratio(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def mebibytes(value: float | None) -> str:
    """Write bytes as MiB; "-" for none."""
    return f"{value / 2**20:,.0f}" if value else "-"


@dataclass(frozen=True)
class ResultTable:
    """A table for the terminal: a title, aligned columns, and notes under them."""

    title: str
    head: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, title: str, columns: Columns, rows: Iterable[Row], notes: Sequence[str] = ()) -> ResultTable:
        cells = tuple(tuple(text(row) for text in columns.values()) for row in rows)
        return cls(title, tuple(columns), cells, tuple(notes))

    def __str__(self) -> str:
        lines = align_columns([self.head, *self.cells], range(len(self.head)))
        return "\n".join([self.title, *lines, *self.notes])


RESULTS = Path("results/bench")
SCHEMA = 4


@dataclass(frozen=True)
class SuiteSession:
    """One run of a suite. resolved: the device of this machine. The others are its options, with their defaults."""

    suite: str
    resolved: resolve.ResolvedTarget
    shape: str = ""
    rounds: int = 0
    seconds: float = 0.0
    cases: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.resolved.device_type == "cpu"

    @functools.cached_property
    def origin(self) -> dict[str, Any]:
        """The part of the JSON file that says where its numbers come from."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": self.resolved.device_name,
            "dtype": self.resolved.dtype,
            "target": self.resolved.target.name,
            "environment": environment_record().to_json(),
        }

    def say(self, line: str) -> None:
        print(line, flush=True)

    def save(self, data: Mapping[str, Any], complete: bool = False) -> None:
        """Save the data so far, so that a killed bench loses one round at most."""
        path = RESULTS / f"{self.suite}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.origin | {"complete": complete} | dict(data))
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
    """One question that `make bench SUITE=name` answers. It takes the options that it has a value for.

    shape: meaning of SHAPE. rounds, seconds: defaults by kind of device ("cpu", "card").
    """

    name: str
    help: str
    run: Callable[[SuiteSession], SuiteResult]
    shape: str = ""
    rounds: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    cases: str = ""
    least_rounds: int = 1

    @property
    def options(self) -> dict[str, str]:
        """Option -> meaning."""
        meanings = {
            "SHAPE": self.shape,
            "ROUNDS": "measurements of each case" if self.rounds else "",
            "SECONDS": "seconds of timed steps of one measurement" if self.seconds else "",
            "CASES": self.cases,
        }
        return {name: meaning for name, meaning in meanings.items() if meaning}

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise UserError for an option that the suite does not take, or for too few rounds."""
        for name in given.keys() - self.options.keys():
            takes = ", ".join(self.options) or "no option"
            raise UserError(f"suite {self.name} takes no {name}=; it takes: {takes}")
        if given.get("ROUNDS", self.least_rounds) < self.least_rounds:
            raise UserError(
                f"ROUNDS={given['ROUNDS']} is too few for suite {self.name}; fix: ROUNDS={self.least_rounds} or more"
            )

    def describe(self) -> str:
        """Describe the suite and its options for --help."""
        options = [f"{'':15}{name}= {text}" for name, text in self.options.items()]
        return "\n".join([f"  {self.name:<13}{self.help}", *options])


def run_suite(suite: Suite, given: Mapping[str, Any]) -> None:
    """Run a suite on this machine, print its tables and notes, and save results/bench/SUITE.json.

    given: the options of the command line by their names in the Makefile.
    """
    suite.check(given)
    resolved = resolve.resolve(config.ANY_TARGET)
    kind = resolved.device_class
    defaults = {"ROUNDS": suite.rounds.get(kind, 0), "SECONDS": suite.seconds.get(kind, 0.0)}
    options = {name.lower(): value for name, value in (defaults | dict(given)).items()}
    session = SuiteSession(suite.name, resolved, **options)
    session.say(f"{resolved.device_name}, {resolved.dtype}")
    result = suite.run(session)
    for block in (*result.tables, *result.notes):
        session.say(f"{block}")
    session.save(result.data, complete=True)
