"""`make card [OUT=folder] [CHECKS="kernels study"]`: check this card; write results/card/card.html and card.json."""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.errors import UserError, run_command
from runtime.resolve import export_environment
from study.make_arguments import command_arguments


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make card", description="Check kernels, gradients, studies, memory and speed."
    )
    parser.add_argument("--out", type=Path, default=Path("results/card"), help="folder of the page")
    parser.add_argument(
        "--checks", default="", help='first words of the checks to run, such as "kernels study"'
    )
    arguments = parser.parse_args(command_arguments(("OUT", "CHECKS")))
    out = arguments.out
    if (out / "runs").exists() or (out.exists() and not out.is_dir()):
        raise UserError(f"OUT={out} is a study or a file; fix: name a folder for the page")
    export_environment()
    from bench.card.run import check_card

    return check_card(out, arguments.checks.split())


if __name__ == "__main__":
    run_command(main)
