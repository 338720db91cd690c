"""`make bench [SUITE=name]`: measure speed, memory and cost of training on this machine."""

from __future__ import annotations

import argparse
import sys

from bench.suite import NAMES, load_suite, run_suite
from runtime.errors import run_command
from runtime.resolved_target import export_environment
from study.make_arguments import command_arguments


def describe_suites() -> str:
    suites = [load_suite(name) for name in NAMES]
    return "\n".join(
        ["suites:", *(f"  {one.name:<13}{one.help} [{' '.join(one.options)}]" for one in suites)]
    )


def main() -> int:
    asked_for_help = not {"-h", "--help"}.isdisjoint(sys.argv[1:])
    parser = argparse.ArgumentParser(
        prog="make bench",
        description="Measure one suite. Print its table and write results/bench/SUITE.json.",
        epilog=describe_suites() if asked_for_help else None,  # a suite may load torch
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", default="speed", metavar="NAME", help="one of the suites below")
    parser.add_argument("--shape", help="part of the suite, such as a model size")
    parser.add_argument("--rounds", type=int, help="number of measurements of each case")
    parser.add_argument("--seconds", type=float, help="duration of one measurement")
    parser.add_argument("--cases", help='only these cases, such as "B plain RALEARN@32" (@: micro-batch)')
    arguments = parser.parse_args(command_arguments(("SUITE", "SHAPE", "ROUNDS", "SECONDS", "CASES")))
    given = {name.upper(): value for name, value in vars(arguments).items() if value not in (None, "")}
    export_environment()
    suite = load_suite(given.pop("SUITE"))
    run_suite(suite, given)
    return 0


if __name__ == "__main__":
    run_command(main)
