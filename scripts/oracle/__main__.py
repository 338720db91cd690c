"""`make oracle RECORD=results/x/records/B0/step40 [OTHER=oracle.json] [OUT=]`: operations against float64 on the CPU.

RECORD: a step that `make record` wrote. OTHER: the results of the benchmark machine. The exit status is 0 for every
verdict.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from configuration.arguments import command_arguments
from gpt2.hardware.resolve import export_environment
from gpt2.system.errors import UserError, run_command


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.oracle")
    for name in ("record", "other", "out"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args(command_arguments(("RECORD", "OTHER", "OUT")))
    if given.record is None:
        raise UserError(
            "there is no RECORD; fix: make record RUN=results/x/runs/B0, then RECORD=the step's folder"
        )
    export_environment()  # before torch is imported
    from numerics.oracle.command import check_all, show
    from numerics.oracle.recorded_operations import operations

    out = given.out or given.record.with_name(f"{given.record.name}-oracle")
    show(check_all(operations(given.record), f"record {given.record}", other=given.other), out)
    return 0


if __name__ == "__main__":
    run_command(main)
