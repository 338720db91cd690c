"""`python -m numerics check-config pack` and `check-config compare A.zip B.zip`: the checklist of two machines."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from numerics.errors import NumericsError

PACK = """
Pack environment variables, package versions, the given scripts with their hyperparameters, and digests of data files
into a zip. Passwords, tokens and keys are left out. With a model, use numerics.ConfigChecker in the training script.
"""
COMPARE = """
Compare two zips: equal, or one of three grades with its reason. Writes OUT/check_config.json and
OUT/check_config.html. The exit status is 0 for every verdict; it is 1 where a zip cannot be used.
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add check-config to the commands of `python -m numerics`."""
    parser = commands.add_parser("check-config", help="pack and compare the checklist of two machines")
    actions = parser.add_subparsers(dest="action", required=True)
    pack = actions.add_parser("pack", description=PACK, help="pack this machine's checklist")
    pack.add_argument("scripts", nargs="*", help="scripts and configuration files of the training")
    pack.add_argument("-o", "--output_path", default="./config_check_pack.zip", help="the zip")
    pack.add_argument("--data", nargs="+", metavar="FILE", help="files or folders to digest")
    pack.set_defaults(run=run_pack)
    compare = actions.add_parser("compare", description=COMPARE, help="compare two zips")
    compare.add_argument("zips", nargs="*", metavar="ZIP", help="the zips of two machines")
    out = os.environ.get("CHECK_OUT") or "check-config"
    compare.add_argument("-o", "--output_path", type=Path, default=out, help="folder of results")
    compare.set_defaults(run=run_compare)


def run_pack(given: argparse.Namespace) -> int:
    from numerics.setup.config_checker import ConfigChecker

    checker = ConfigChecker(shell_path=given.scripts, output_zip_path=given.output_path, data=given.data)
    print(f"wrote {checker.path}")
    return 0


def run_compare(given: argparse.Namespace) -> int:
    from numerics.setup.compared_checklists import compare_checklists, comparison_document, write_comparison
    from pages.document import render_terminal

    zips = given.zips or [path for name in ("A", "B") if (path := os.environ.get(f"CHECK_{name}"))]
    if len(zips) != 2:
        raise NumericsError(
            f"two zips are needed, {len(zips)} given; fix: compare A.zip B.zip (make: A=A.zip B=B.zip)"
        )
    rows = compare_checklists(*zips)
    names = [Path(path).name for path in zips]
    labels = names if names[0] != names[1] else zips
    written = write_comparison(rows, labels, given.output_path)
    print(
        render_terminal(comparison_document(rows, labels)), *(f"wrote {path}" for path in written), sep="\n"
    )
    return 0
