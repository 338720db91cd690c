"""Load trained runs as models, on the CPU in float32, or open them for a replay of a step."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gpt2.resume import check_fits
from gpt2.training_step import build_model
from gpt2.transformer import GPT2, learned_scalars, restore_step
from ra import arms
from ra.arms import LEARNED, VariantError, custom_variants, parse_arm, reciprocal_layers
from ra.hooks import custom_folder
from ra.variants import variant
from runtime import checkpoint, run_record
from runtime.errors import UserError
from runtime.records import Task
from runtime.resolved_target import export_environment
from runtime.settings import Config, load_config
from study.executors.child_process import process_settings
from study.runs import REMEDY, FinishedRecord

if TYPE_CHECKING:
    from gpt2.replay import RunReplay
    from gpt2.transformer import ModelParts


@dataclass
class TrainedRun:
    """The model of a checkpoint. shares: weight of the reciprocal path by layer; None for custom attention."""

    name: str
    variant: str
    seed: int
    iteration: int
    config: Config
    model: GPT2
    shares: list[float | None]
    notes: list[str]


def load_run(run_dir: Path) -> TrainedRun:
    """Load the newest checkpoint of a run as a model.

    A custom variant is the file that the study recorded, also where ra/custom has another one now or none.

    Raises UserError without a checkpoint; RecordError or ConfigError for missing and unreadable files.
    """
    record = run_record.load_given(run_dir)
    refuse_altered(run_dir, record)
    config = load_config(run_dir / "config")
    name = str(record.variant)
    with recorded_variants(run_dir, name) as other:
        chosen = variant(name, config.model, config.alternation)
        config = chosen.configure(config)
        model = build_model(config.model, chosen.parts, record.seed)
        loaded, notes = _newest_checkpoint(run_dir, record, model)
        model.load_state_dict(loaded.state["model"])
        restore_step(model, loaded.iteration)
        shares = _shares(name, model, config.model.layers)
    notes = other + notes
    return TrainedRun(record.run, name, record.seed, loaded.iteration, config, model, shares, notes)


def refuse_altered(run_dir: Path, record: run_record.RunRecord) -> None:
    """UserError where a file of a finished run is not as it was written."""
    if damage := run_record.altered(record, run_dir):
        raise UserError(f"{run_dir} is damaged: {'; '.join(damage)}; {REMEDY}")


def finished_record(run_dir: Path, tasks: tuple[Task, ...] = ("gpt2",)) -> FinishedRecord:
    """Read the record of a finished run of one of the tasks. UserError for another status, and without its weights."""
    record = run_record.load_given(run_dir, tasks)
    known = record.progress and record.target and record.fingerprint
    if record.status != "finished" or not known:
        raise UserError(f"{run_dir} is {record.status}; fix: run `make` until the run is finished")
    weights = run_record.WEIGHTS if record.task == "grpo" else "checkpoint"
    if not (run_dir / weights).is_dir():
        raise UserError(f"{run_dir} has no {weights}; fix: copy the run's folder with its {weights}/")
    return cast("FinishedRecord", record)


def require_last_weights(run: TrainedRun, run_dir: Path, record: FinishedRecord) -> None:
    """UserError if the loaded weights are not those of the end of the run."""
    if run.iteration != record.progress.iterations:
        raise UserError(
            f"{run_dir}/checkpoint has the weights of iteration {run.iteration}; the run finished at "
            f"{record.progress.iterations}; fix: copy the checkpoint of the finished run"
        )


@contextlib.contextmanager
def recorded_variants(run_dir: Path, name: str) -> Iterator[list[str]]:
    """Within the block, custom variants are the study's copies if the arm `name` uses one that differs from ra/custom.

    Yields a note on the files that differ.
    """
    folder = run_dir.resolve().parent.parent / "own"
    changed = [path for path in sorted(folder.glob("*.py")) if _differs(path, arms.CUSTOM_FOLDER / path.name)]
    used: list[Path] = []
    if changed:
        with custom_folder(folder):
            used = [path for path in changed if path.stem.upper() in parse_arm(name).file_variants]
    if not used:
        yield []
        return
    with custom_folder(folder):
        yield [
            f"{path.name} is the study's copy, {path}; ra/custom/{path.name} differs from it" for path in used
        ]


def _differs(copy: Path, source: Path) -> bool:
    return not source.is_file() or source.read_bytes() != copy.read_bytes()


def _newest_checkpoint(
    run_dir: Path, record: run_record.RunRecord, model: GPT2
) -> tuple[checkpoint.LoadedCheckpoint, list[str]]:
    """Return the newest checkpoint that fits the model, and its notes."""
    planned = record.schedule.iterations if record.schedule else sys.maxsize
    fits = functools.partial(check_fits, iterations=planned, model=model)
    loaded = checkpoint.load_latest(run_dir / "checkpoint", fits)
    if loaded is None:
        raise UserError(f"{run_dir} has no checkpoint; fix: run `make` until the run has saved one")
    return loaded, loaded.skipped


def _shares(name: str, model: GPT2, layers: int) -> list[float | None]:
    """Return the weight of the reciprocal path by layer."""
    attention = parse_arm(name).attention
    fixed = reciprocal_layers(attention, layers)
    if fixed is not None:
        return [float(layer in fixed) for layer in range(layers)]
    learned = learned_scalars(model).get("alternation_probability", []) if attention == LEARNED else []
    return list(learned) if len(learned) == layers else [None] * layers


# Open a run for a replay: its environment, its arm, and the folders of results.


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


def _build_arm(run_dir: Path, record: run_record.RunRecord, config: Config) -> tuple[Config, ModelParts]:
    from ra.variants import variant

    try:
        chosen = variant(record.variant, config.model, config.alternation)
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
