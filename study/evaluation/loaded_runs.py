"""Measure attention of trained runs on one text: statistics of every layer, maps of chosen heads.

Checkpoints are loaded on the CPU in float32. Nothing is trained.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from gpt2 import dataset, tokenizer
from gpt2.resume import check_fits
from gpt2.training_step import build_model
from gpt2.transformer import GPT2, learned_scalars, restore_step
from ra import arms, attention_maps
from ra.arms import LEARNED, VariantError, custom_variants, parse_arm, reciprocal_layers
from ra.hooks import custom_folder
from ra.variants import variant
from referee.numerics.text_files import text_parts
from referee.pages.html_page import render_html
from runtime import checkpoint, files, run_record
from runtime.errors import UserError
from runtime.records import Task
from runtime.resolved_target import export_environment
from runtime.settings import Config, load_config
from study.evaluation.attention_page import (
    STATISTICS,
    AttentionMap,
    InputText,
    LayerAttention,
    Masses,
    RunAttention,
    attention_document,
    early_late_means,
    statistic_key,
    statistics_by_path,
    write,
)
from study.executors.child_process import process_settings
from study.runs import REMEDY, FinishedRecord

if TYPE_CHECKING:
    from gpt2.replay import RunReplay
    from gpt2.transformer import ModelParts


# The text if the data of the run are not on this machine.
SENTENCE = (
    "When the last train had left the station, the old clock above the platform struck ten, and the woman who had sold "
    "tickets there for thirty years locked the door of her office, put the key into the pocket of her coat, and walked "
    "home along the river, as she had done every night since the day when the station was opened."
)
READABLE = 48  # maximum tokens for a map with a label for each token


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


def choose_text(runs: Sequence[TrainedRun], file: Path | None) -> tuple[list[int], InputText]:
    """Return the tokens of `file`, else of the first validation window, else of a built-in sentence.

    The length is at most the smallest block size of the runs. UserError for an unreadable or short
    file, or runs with several tokenizers.
    """
    longest = min(run.config.model.block_size for run in runs)
    tokenizers = {run.config.data.tokenizer for run in runs}
    if len(tokenizers) > 1:
        raise UserError(
            f"the runs use several tokenizers ({', '.join(sorted(tokenizers))}), so they cannot read one text; fix: "
            "inspect the runs of one tokenizer"
        )
    encoding = tokenizer.load(tokenizers.pop())
    if file is not None:
        source = f"the start of {file.name}"
        ids = encoding.encode(next(text_parts(file, fix="TEXT=a text file"), ""))
        if len(ids) < 2:
            raise UserError(
                f"TEXT={file} has {len(ids)} tokens, and attention needs 2; fix: TEXT=a longer file"
            )
    elif window := _validation_window(runs[0].config):
        ids, source = window, "the first validation window"
    else:
        source = "a built-in sentence, because the data of the run are not on this machine"
        ids = encoding.encode(SENTENCE)
    ids = ids[:longest]
    pieces = [tokenizer.decode(encoding, [token]) for token in ids if len(ids) <= READABLE]
    return ids, InputText(source, len(ids), tuple(pieces))


def _validation_window(config: Config) -> list[int]:
    """Return the first validation window; empty if the data are not prepared. Nothing is downloaded."""
    length = config.model.block_size
    try:
        directory, _ = dataset.corpus_directory(config.data)
        if not directory.is_dir():
            return []
        window = dataset.validation_windows(dataset.open_corpus(directory).validation, length, length)
    except UserError:
        return []
    return list(np.asarray(window[0][:-1], dtype=np.int64).tolist())


def select_indices(asked: Sequence[int], count: int, kind: str, default: Sequence[int]) -> list[int]:
    """Return the chosen layers or heads, sorted and unique, or the default. UserError above count - 1."""
    for number in asked:
        if not 0 <= number < count:
            raise UserError(f"{kind} {number} does not exist; fix: {kind.upper()}S=0 .. {count - 1}")
    return sorted(set(asked)) or list(default)


def inspect_run(
    run: TrainedRun, ids: Sequence[int], layers: Sequence[int], heads: Sequence[int]
) -> RunAttention:
    """Measure every layer, and compute maps of the chosen layers and heads."""
    found: list[LayerAttention] = []
    drawn: list[AttentionMap] = []
    for layer, (query_HTD, key_HTD) in attention_maps.queries_and_keys(run.model, torch.tensor(ids)).items():
        maps = attention_maps.layer_maps(query_HTD, key_HTD, heads if layer in layers else ())
        found.append(layer_attention(layer, maps, run.shares[layer]))
        drawn += head_maps(layer, maps)
    depth, block = len(run.model.blocks), attention_maps.pixel_tokens(len(ids), attention_maps.PIXELS)
    about = (run.name, run.variant, run.seed, run.iteration, depth, block)
    return RunAttention(*about, tuple(found), tuple(drawn), tuple(run.notes))


def layer_attention(layer: int, maps: attention_maps.LayerMaps, share: float | None) -> LayerAttention:
    """Convert the statistics of a layer to plain data."""
    values = {
        statistic_key(name, path): tuple(
            getattr(getattr(maps, path) if STATISTICS[name][1] else maps, name).tolist()
        )
        for name, path in statistics_by_path()
    }
    return LayerAttention(layer, share, **values)


def head_maps(layer: int, maps: attention_maps.LayerMaps) -> list[AttentionMap]:
    """Convert the maps of a layer to plain data, with masses of four digits."""

    def lower(masses: Tensor) -> Masses:
        rows: list[list[float]] = masses.tolist()
        return tuple(tuple(float(f"{value:.4g}") for value in row[: at + 1]) for at, row in enumerate(rows))

    return [AttentionMap(layer, head, *map(lower, pair)) for head, pair in maps.pictures.items()]


PAGE = "attention.html"


def write_attention(
    run_dirs: Sequence[Path], text_file: Path | None, layers: Sequence[int], heads: Sequence[int]
) -> list[str]:
    """Write attention.json of each run, and one page of all runs in the folder of the first.

    layers, heads: of the maps; by default the first and the last layer, and head 0. Returns one message a line.
    """
    models = [load_run(path) for path in run_dirs]
    depth = min(run.config.model.layers for run in models)
    width = min(run.config.model.heads for run in models)
    layers = select_indices(layers, depth, "layer", sorted({0, depth - 1}))
    heads = select_indices(heads, width, "head", [0])
    ids, text = choose_text(models, text_file)
    inspected = [inspect_run(run, ids, layers, heads) for run in models]
    for path, run in zip(run_dirs, inspected, strict=True):
        write(path, [run], text)
    files.write_text(run_dirs[0] / PAGE, render_html(attention_document(inspected, text)))
    return [
        *summary(inspected, text),
        f"wrote {run_dirs[0] / PAGE}, and attention.json in the folder of each run",
    ]


def summary(runs: Sequence[RunAttention], text: InputText) -> list[str]:
    """Return lines for the terminal: the text, then each run and the distance between its two paths."""
    lines = [
        f"text: {text.source}, {text.tokens:,} tokens",
        "total variation between standard and reciprocal attention (0: equal, 1: disjoint):",
    ]
    for run in runs:
        early, late = (
            "-" if value is None else f"{value:.3f}"
            for value in early_late_means(run, "total_variation", "standard")
        )
        lines.append(
            f"{run.name} (variant {run.variant}, seed {run.seed}, iteration {run.iteration:,}): "
            f"{early} in the early layers, {late} in the late layers"
        )
        lines += [f"{run.name}: {note}" for note in run.notes]
    return lines


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
