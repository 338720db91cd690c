"""`make admit VARIANT=MINE`: examine one attention at the shape of .config.

The exit status is 1 where a check fails. Nothing is trained but two steps of a small model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ra.admission.process import examine_variants
from ra.arms import known_arm, overview, refuse_misnamed_files
from referee.pages.document import render_terminal
from runtime import resolved_target
from runtime.dotconfig import read_symbols
from runtime.errors import UserError, run_command
from runtime.settings import Config
from study.admit import admission_document
from study.make_arguments import command_arguments

CONFIG = Path(".config")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.admit")
    parser.add_argument("--variant", default="")
    name = parser.parse_args(command_arguments(("VARIANT",))).variant
    refuse_misnamed_files()
    if not name:
        print(*overview(), sep="\n")
        raise UserError("no variant is named; fix: make admit VARIANT=NAME, with one of these arms")
    if not CONFIG.exists():
        raise UserError("there is no .config; fix: make defconfig-gpt2-ra-ablation (make help lists others)")
    symbols = read_symbols(CONFIG)
    config = Config.from_symbols(symbols)
    known_arm(name, config.model.layers)
    began = time.monotonic()
    found = examine_variants(
        [name],
        config.model,
        config.alternation,
        autocast=resolved_target.resolve(config.target).dtype == "bfloat16",
        count_costs=True,
    )[name]
    model = config.model
    shape = (
        f"{model.size} model of .config: {model.layers} layers, {model.heads} heads of {model.width // model.heads}, "
        f"sequences of {model.block_size}; examined in {time.monotonic() - began:.0f} s"
    )
    print(render_terminal(admission_document(found, shape)))
    return 0 if found.admitted else 1


if __name__ == "__main__":
    run_command(main)
