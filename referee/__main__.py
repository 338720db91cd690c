"""`python -m referee COMMAND`: accuracy debugging of any torch program. --help lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from referee.errors import NumericsError, UserError
from referee.numerics.diagnose.diagnosis import add_commands as add_diagnose
from referee.numerics.monitor.invariants import add_command as add_monitor
from referee.numerics.oracle.command import add_commands as add_oracle
from referee.numerics.record.record_command import add_commands as add_record
from referee.numerics.repeat.repeat_command import add_commands as add_repeat
from referee.numerics.runs.logp_diff import add_commands as add_logp
from referee.numerics.runs.stress_command import add_commands as add_stress
from referee.numerics.search.commands import add_commands as add_search
from referee.numerics.setup.compared_checklists import add_commands as add_checklist
from referee.numerics.trend.trend import add_command as add_trend

COMPARE = """
Compare two records of referee.numerics.Recorder or msProbe, and write OUT/compare_result.csv, OUT/compare.json and
OUT/compare.html. The exit status is 0 for every verdict, also for "diverges"; it is 1 where a
record cannot be used.
"""
VIEW = """
Write the tree of a record as one HTML page: every call with its values, settings, call stack and overflow level. The
tree of two records is in compare.html.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status; a wrong input is one line on stderr and 1."""
    parser = argparse.ArgumentParser(prog="referee", description="Why do two runs differ?")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in COMMANDS:
        add(commands)
    given = parser.parse_args(arguments)
    try:
        status: int = given.run(given)
        return status
    except UserError as error:
        return _failed(str(error))
    except OSError as error:
        if error.filename is None:  # as of stdout
            raise
        fix = "check the path and its permissions"
        return _failed(f"{error.filename} cannot be used: {error.strerror}; fix: {fix}")


def add_compare(commands: Any) -> None:
    names = ("A", "B", "OUT")  # set by the Makefile
    default = {name: os.environ.get(f"COMPARE_{name}") or None for name in names}
    parser = commands.add_parser("compare", description=COMPARE, help="compare two records")
    parser.add_argument("-tp", "--target_path", default=default["A"], help="the record to judge")
    parser.add_argument("-gp", "--golden_path", default=default["B"], help="the record to compare with")
    out = default["OUT"] or "compare-records"
    parser.add_argument("-o", "--output_path", default=out, help="folder of results")
    parser.add_argument(
        "--map", type=Path, help="JSON, {target name: golden name}: names of modules or calls"
    )
    merged = "merged: ranks share a golden rank's work"
    parser.add_argument("--ranks", choices=("equal", "merged"), default="equal", help=merged)
    parser.set_defaults(run=run_compare)


def add_view(commands: Any) -> None:
    parser = commands.add_parser("view", description=VIEW, help="the tree of one record")
    parser.add_argument(
        "-tp", "--target_path", type=Path, required=True, help="the record: dump, step or rank"
    )
    parser.add_argument("-o", "--output_path", type=Path, default=Path("tree.html"), help="the page")
    parser.set_defaults(run=run_view)


def _failed(message: str) -> int:
    with contextlib.suppress(OSError):  # stderr is closed
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 1


def run_main() -> int:
    """Run main. A reader of the output that ends, as in `| head`, is not an error; a full disk is."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal of another encoding
    status = 0
    try:
        try:
            status = main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at exit Python would print a traceback
    except OSError as error:
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        if not isinstance(error, BrokenPipeError):
            fix = "check the disk and the target of the output"
            return _failed(f"reading or writing failed: {error.strerror}; fix: {fix}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return status


def run_compare(given: argparse.Namespace) -> int:
    from referee.numerics.compare.compare_records import compare_records
    from referee.numerics.compare.comparison_page import next_command, summary, write_tables
    from referee.numerics.compare.matched_calls import read_map
    from referee.numerics.view.record_view import write_comparison_view

    if not given.target_path or not given.golden_path:
        raise NumericsError(
            "two records are needed; fix: give -tp FOLDER -gp FOLDER (make: A=FOLDER B=FOLDER)"
        )
    names = read_map(given.map) if given.map else {}
    comparison = compare_records(Path(given.target_path), Path(given.golden_path), names, given.ranks)
    written = write_tables(comparison, Path(given.output_path))
    written.append(Path(given.output_path) / "compare.html")
    write_comparison_view(comparison, names, written[-1])
    lines = [*summary(comparison), next_command(comparison), *(f"wrote {path}" for path in written)]
    print("\n".join(filter(None, lines)))
    return 0


def run_view(given: argparse.Namespace) -> int:
    from referee.numerics.view.record_view import write_record_view

    if critical := write_record_view(given.target_path, given.output_path):
        print(f"first critical: {critical}")
    print(f"wrote {given.output_path}")
    return 0


COMMANDS = (
    add_diagnose,
    add_checklist,
    add_record,
    add_compare,
    add_view,
    add_monitor,
    add_trend,
    add_oracle,
    add_repeat,
    add_stress,
    add_search,
    add_logp,
)

if __name__ == "__main__":
    sys.exit(run_main())
