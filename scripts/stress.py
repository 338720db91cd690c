"""`make stress MINUTES=10 [OUT=folder]`: find a faulty device by results that must be equal to the bit.

Every accelerator takes part, of a rank under torchrun its own; without accelerators two processes of the CPU.
Ctrl-C ends it with the table so far. The exit status is 1 where a device deviates.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.errors import UserError, run_command
from runtime.resolved_target import export_environment
from study.make_arguments import command_arguments


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.stress")
    parser.add_argument("--minutes", default="10")
    parser.add_argument("--out", default="results/stress")
    given = parser.parse_args(command_arguments(("MINUTES", "OUT")))
    try:
        minutes = float(given.minutes)
    except ValueError as error:
        raise UserError(f"MINUTES={given.minutes} is not a number; fix: make stress MINUTES=10") from error
    export_environment(launched=True)  # before torch is imported
    from referee.numerics.runs.stress_command import stress_devices

    return stress_devices(minutes, Path(given.out))


if __name__ == "__main__":
    run_command(main)
