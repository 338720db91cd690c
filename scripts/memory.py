"""`make memory [TARGET="a100-40g w7900"] [VARIANTS="B RALEARN"]`: predicted and measured peak memory.

With TARGET the study of that target is predicted, as `make defconfig-gpt2-ra-ablation+TARGET` configures it; CONFIG_X=v
changes it, and FROM=.config takes the settings of .config instead. No card is needed and nothing is measured.
Without TARGET the study of .config is predicted, and measured if its target is this machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from runtime.dotconfig import Symbols, read_symbols
from runtime.errors import UserError, run_command
from study.kconfig_commands import STUDY, symbols_for_target
from study.make_arguments import command_arguments, refuse_assignments
from study.planning.memory_tables import measure_variant, report_memory
from study.study_settings import StudySettings

CONFIG = Path(".config")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.memory")
    parser.add_argument("--target", default="")
    parser.add_argument("--from", default="", dest="base")
    parser.add_argument("--variants", default="")
    parser.add_argument("--measure", default="", help="measure this variant here and print JSON")
    parser.add_argument("--micro", type=int, default=0)
    arguments = parser.parse_args(command_arguments(("TARGET", "FROM", "VARIANTS"), symbols=True))
    if arguments.measure:
        symbols = read_symbols(CONFIG)
        folder = StudySettings.from_symbols(symbols).results_dir / "memory"
        print(json.dumps(measure_variant(symbols, arguments.measure, arguments.micro, folder)))
        return 0
    for target in arguments.target.split() or [""]:
        symbols, source = configuration(target, arguments.base)
        if symbols.flag("GRPO"):
            raise UserError(
                f"memory is predicted for GPT-2, and {source} trains by GRPO; fix: make memory TARGET=h100"
            )
        print(f"configuration: {source}")
        settings = StudySettings.from_symbols(symbols)
        names = arguments.variants.split() or settings.variants
        report_memory(
            symbols, settings.variants, names, settings.results_dir / "memory", planning=bool(target)
        )
    return 0


def configuration(target: str, base: str) -> tuple[Symbols, str]:
    """The symbols to predict, and their source in words."""
    if target:
        symbols, source = symbols_for_target(target, base)
        unused = CONFIG.exists() and not base
        return symbols, source + (" (.config is not used; FROM=.config uses its settings)" if unused else "")
    if base:
        raise UserError(f'FROM={base} needs a target; fix: make memory FROM={base} TARGET="a100-40g"')
    refuse_assignments()
    if not CONFIG.exists():
        raise UserError(f"there is no .config; fix: make memory TARGET=a100-40g, or make defconfig-{STUDY}")
    return read_symbols(CONFIG), ".config"


if __name__ == "__main__":
    run_command(main)
