"""Define a suite of `make bench` and run it: check its options, print its tables, save its JSON file."""

from __future__ import annotations

import datetime
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scipy.stats import quantile_test

from referee.pages.document import align_columns
from runtime import resolved_target, settings
from runtime.errors import UserError
from runtime.files import write_json
from runtime.provenance import environment_record

RESULTS = Path("results/bench")
SCHEMA = 5
FEW = 6  # rounds from which a median has a 95 % interval within their range
INTERVAL = f"95 % interval; below {FEW} rounds the range"

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]  # head -> text of a row's cell


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median and its 95 % interval (low, high), or below FEW values the range. None for no values."""
    if not values:
        return None
    low, high = min(values), max(values)
    if len(values) >= FEW:
        low, high = quantile_test(values, p=0.5).confidence_interval(0.95)
    return {"median": median(values), "low": float(low), "high": float(high)}


def format_spread(value: Mapping[str, float] | None, form: str = ".2f", scale: float = 1.0) -> str:
    """Write a spread as "1.12 [1.05, 1.19]"; "-" for None."""
    if value is None:
        return "-"
    middle, low, high = (f"{value[key] * scale:{form}}" for key in ("median", "low", "high"))
    return f"{middle} [{low}, {high}]"


def format_ratio(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def format_table(title: str, columns: Columns, rows: Iterable[Row], notes: Sequence[str] = ()) -> str:
    """Return a table for the terminal: a title, aligned columns, and notes under them."""
    cells = [tuple(text(row) for text in columns.values()) for row in rows]
    return "\n".join([title, *align_columns([tuple(columns), *cells], range(len(columns))), *notes])


@dataclass(frozen=True)
class SuiteSession:
    """One run of a suite with its options."""

    suite: str
    resolved: resolved_target.ResolvedTarget  # the device of this machine
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
class Suite:
    """One question that `make bench SUITE=name` answers."""

    name: str
    help: str
    run: Callable[
        [SuiteSession], tuple[Mapping[str, Any], list[str]]
    ]  # -> content of the JSON file, tables and notes
    rounds: int  # default
    seconds: float = 0.0  # default; 0: the suite does not take SECONDS
    cases: bool = False  # whether it takes CASES
    least_rounds: int = 1

    @property
    def options(self) -> list[str]:
        return ["SHAPE", "ROUNDS", *(["SECONDS"] if self.seconds else []), *(["CASES"] if self.cases else [])]

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise UserError for an option that the suite does not take, or for too few rounds."""
        for name in given.keys() - self.options:
            raise UserError(f"suite {self.name} takes no {name}=; fix: use {', '.join(self.options)}")
        if given.get("ROUNDS", self.least_rounds) < self.least_rounds:
            raise UserError(
                f"ROUNDS={given['ROUNDS']} is too few for suite {self.name}; fix: ROUNDS={self.least_rounds} or more"
            )


def run_suite(suite: Suite, given: Mapping[str, Any]) -> None:
    """Run a suite on this machine, print its tables and notes, and save results/bench/SUITE.json.

    given: the options of the command line by their names in the Makefile.
    """
    suite.check(given)
    resolved = resolved_target.resolve(settings.ANY_TARGET)
    options: dict[str, Any] = {"rounds": suite.rounds, "seconds": suite.seconds}
    options |= {name.lower(): value for name, value in given.items()}
    session = SuiteSession(suite.name, resolved, **options)
    session.say(f"{resolved.device_name}, {resolved.dtype}")
    data, blocks = suite.run(session)
    for block in blocks:
        session.say(block)
    session.save(data, complete=True)


# The suites of `make bench`, one module each, every one with a SUITE.


NAMES = ("speed", "loss_parity", "recorder", "monitor")


def load_suite(name: str) -> Suite:
    """Import one suite. UserError for an unknown name."""
    if name not in NAMES:
        raise UserError(f"unknown suite {name!r}; fix: make bench SUITE={'|'.join(NAMES)}")
    suite: Suite = importlib.import_module(f"bench.suites.{name}").SUITE
    return suite
