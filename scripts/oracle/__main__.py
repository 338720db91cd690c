"""`make oracle [RECORD=results/x/records/B0/step40] [OTHER=oracle.json] [OUT=]`: operations against float64 on the CPU.

RECORD: a step that `make record` wrote; its operations are checked. Without it, the operations of GPT-2 are checked at
the shapes of .config. OTHER: the results of the benchmark machine. The exit status is 0 for every verdict.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from configuration.arguments import command_arguments
from gpt2.config.config import Config
from gpt2.config.dotconfig import read_symbols
from gpt2.hardware.resolve import export_environment, resolve
from gpt2.system.errors import UserError, run_command
from study.runner.settings import StudySettings

CONFIG = Path(".config")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.oracle")
    for name in ("record", "other", "out"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args(command_arguments(("RECORD", "OTHER", "OUT")))
    export_environment()  # before torch is imported
    return check_record(given.record, given) if given.record else check_config(given)


def check_record(record: Path, given: argparse.Namespace) -> int:
    """Check the operations of a recorded step on the device of this machine."""
    from numerics.oracle.command import check_all, show
    from numerics.oracle.recorded_operations import operations

    out = given.out or record.with_name(f"{record.name}-oracle")
    show(check_all(operations(record), f"record {record}", other=given.other), out)
    return 0


def check_config(given: argparse.Namespace) -> int:
    """Check the operations of GPT-2 at the shapes and the dtype of .config."""
    if not CONFIG.exists():
        raise UserError(
            "there is no .config and no RECORD; fix: make defconfig-gpt2-ra-ablation, or make oracle RECORD=FOLDER"
        )
    symbols = read_symbols(CONFIG)
    config = Config.from_symbols(symbols)
    target = resolve(config.target)
    import torch

    from numerics.oracle.command import check_all, show
    from scripts.oracle.gpt2_operations import Shapes, gpt2_operations

    model = config.model
    shapes = Shapes(model.width, model.heads, model.block_size, model.padded_vocabulary)
    found = gpt2_operations(shapes, getattr(torch, target.dtype))
    source = f"GPT-2 of .config: width {shapes.width}, {shapes.heads} heads, {shapes.tokens} tokens, {target.dtype}"
    out = given.out or StudySettings.from_symbols(symbols).results_dir / "oracle"
    show(check_all(found, source, target.device_type, given.other), out)
    return 0


if __name__ == "__main__":
    run_command(main)
