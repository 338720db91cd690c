"""Open a run for a replay: its environment, its arm, and the folders of results."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ra.arms import VariantError, custom_variants
from runtime import run_record
from runtime.errors import UserError
from runtime.resolved_target import export_environment
from study.executors.child_process import process_settings

if TYPE_CHECKING:
    from gpt2.replay import RunReplay
    from gpt2.transformer import ModelParts
    from runtime.dotconfig import Symbols
    from runtime.settings import Config

RESTARTED = "RA_RESTARTED"  # set in the process that was restarted


def enter_environment(record: run_record.RunRecord, restart: bool) -> dict[str, str]:
    """Set the variables of this machine and return the environment of the run. Call before torch is imported.

    restart: whether to restart this process, once, where its environment is another.
    """
    export_environment()
    restarted = os.environ.pop(RESTARTED, None)
    environment = run_environment(record)
    if restart and not restarted and environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment | {RESTARTED: "1"})
    return environment


def run_environment(record: run_record.RunRecord) -> dict[str, str]:
    """Return the environment of the training process: this one's, with the recorded variables of the run."""
    recorded = record.environment.variables if record.environment else {}
    return process_settings(os.environ | {name: str(value) for name, value in recorded.items()})


def open_run(run_dir: Path, record: run_record.RunRecord, step: int, from_start: bool = False) -> RunReplay:
    """Return the run before `step`, and print which checkpoints cannot be used."""
    from gpt2.replay import RunReplay

    build = functools.partial(_build_arm, run_dir)
    replay = RunReplay(run_dir, record, step, build, from_start)
    for line in replay.skipped:
        print(line)
    return replay


def _build_arm(
    run_dir: Path, record: run_record.RunRecord, config: Config, symbols: Symbols
) -> tuple[Config, ModelParts]:
    from ra.arms import AlternationSettings
    from ra.variants import variant

    try:
        chosen = variant(record.variant, config.model, AlternationSettings.from_symbols(symbols))
    except VariantError as error:
        raise missing_source(run_dir, record) or error from error
    return chosen.configure(config), chosen.parts


def missing_source(run_dir: Path, record: run_record.RunRecord) -> UserError | None:
    """Return an error that names the study's copy of a file that ra/custom lacks; None where none is lacking."""
    for source in sorted((run_dir.resolve().parents[1] / "own").glob("*.py")):
        if source.stem.upper() in record.variant.upper() and source.stem.upper() not in custom_variants():
            return UserError(
                f"{record.run} needs ra/custom/{source.name}, which does not exist; fix: copy {source} there"
            )
    return None
