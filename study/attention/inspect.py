"""Measure the attention of trained runs on one text: statistics of every layer, and maps of chosen heads.

A checkpoint is read on the CPU in float32. Nothing is trained or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpt2.artifacts import checkpoint, run_record
from gpt2.config.config import Config, read_symbols
from gpt2.data import dataset, tokenizer
from gpt2.model.transformer import GPT2, learned_scalars
from gpt2.system.errors import UserError
from gpt2.train.step import build_model
from ra import attention_maps
from ra.names import LEARNED, reciprocal_layers
from ra.settings import AlternationSettings
from ra.variants import variant
from study.attention.data import (
    STATISTICS,
    LayerLook,
    Look,
    Picture,
    Text,
    key,
    keys,
    read_study,
    write_study,
)
from study.records.lengths import saved_counts, shown_length
from study.records.runs import read_runs

# The text for a run whose data do not exist on this machine.
SENTENCE = (
    "When the last train had left the station, the old clock above the platform struck ten, and the woman who had sold "
    "tickets there for thirty years locked the door of her office, put the key into the pocket of her coat, and walked "
    "home along the river, as she had done every night since the day when the station was opened."
)
READABLE = 48  # most tokens of a text for which a map names each token
PIXELS_OF_REPORT = 64  # a side of a map in a report, which has many


class AttentionError(UserError, ValueError):
    """A run, a text, a layer or a head cannot be inspected."""


@dataclass
class Trained:
    """A run's checkpoint as a model. reciprocal: each layer's share of the reciprocal path; None without that path."""

    name: str
    variant: str
    seed: int
    iteration: int
    config: Config
    model: GPT2
    reciprocal: list[float | None]
    notes: list[str]


def load(run_dir: Path, iterations: int | None = None) -> Trained:
    """Load the newest checkpoint of a run as a model.

    While a run is extended, its finished model is loaded. iterations: of the finished model to load, where a run has
    several. Raises AttentionError without a checkpoint, RecordError and ConfigError for files that cannot be read.
    """
    if not run_dir.is_dir():
        raise AttentionError(f"{run_dir} is not a folder; fix: make attention RUN=results/STUDY/runs/NAME")
    record = run_record.load(run_dir)
    symbols = read_symbols(run_dir / "config")
    config = Config.from_symbols(symbols)
    loaded, notes = _finished_model(run_dir, record, iterations)
    name = str(record["variant"])
    chosen = variant(name, config.model, AlternationSettings.from_symbols(symbols))
    model = build_model(config.model, chosen.attention)
    try:
        model.load_state_dict(loaded.state["model"])
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise AttentionError(
            f"the checkpoint of {run_dir} is not of the model that its config describes: {reason}"
        ) from error
    shares = _shares(name, model, config.model.layers)
    return Trained(record["run"], name, record["seed"], loaded.iteration, config, model, shares, notes)


def _finished_model(
    run_dir: Path, record: run_record.RunRecord, iterations: int | None
) -> tuple[checkpoint.Loaded, list[str]]:
    """The checkpoint to load and its notes: of a run that is being extended, the saved one of its finished length."""
    counts = saved_counts(run_dir, "run") if record["status"] != "finished" else []
    if iterations in saved_counts(run_dir, "run"):
        counts = [iterations]
    for count in reversed(counts):
        loaded = checkpoint.load_latest(run_dir / f"checkpoint-{count}")
        if loaded:
            note = f"the study is being extended; this is its finished model of {count} iterations"
            return loaded, [note, *loaded.skipped]
    loaded = checkpoint.load_latest(run_dir / "checkpoint")
    if loaded is None:
        raise AttentionError(f"{run_dir} has no checkpoint; fix: run `make` until the run has saved one")
    return loaded, loaded.skipped


def _shares(name: str, model: GPT2, layers: int) -> list[float | None]:
    fixed = reciprocal_layers(name, layers)
    if fixed is not None:
        return [float(layer in fixed) for layer in range(layers)]
    learned = learned_scalars(model).get("alternation_probability", []) if name == LEARNED else []
    return list(learned) if len(learned) == layers else [None] * layers


def choose_text(runs: Sequence[Trained], file: Path | None) -> tuple[list[int], Text]:
    """Tokens of the start of the file, else of the first validation window, else of a sentence.

    At most the shortest block size of the runs. AttentionError if the file cannot be read or has fewer than two tokens.
    """
    longest = min(run.config.model.block_size for run in runs)
    if file is not None:
        try:
            words = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise AttentionError(
                f"TEXT={file} cannot be read: {error.strerror}; fix: name a text file"
            ) from error
        ids = tokenizer.load().encode_ordinary(words)[:longest]
        if len(ids) < 2:
            raise AttentionError(f"TEXT={file} has {len(ids)} tokens; fix: a text of at least 2")
        return _with_words(ids, f"the start of {file.name}")
    window = _validation_window(runs[0].config)
    if window is not None:
        return _with_words(window[:longest], "the first validation window")
    ids = tokenizer.load().encode_ordinary(SENTENCE)[:longest]
    return _with_words(ids, "a built-in sentence, because the data of the run are not on this machine")


def _with_words(ids: list[int], source: str) -> tuple[list[int], Text]:
    pieces = [tokenizer.load().decode([token]) for token in ids] if len(ids) <= READABLE else []
    return ids, Text(source, len(ids), pieces)


def _validation_window(config: Config) -> list[int] | None:
    """The first validation window if the data are prepared. Nothing is downloaded."""
    try:
        directory, _ = dataset.corpus_directory(config.data)
        if not directory.is_dir():
            return None
        corpus = dataset.open_corpus(directory)
        window = dataset.validation_windows(
            corpus.validation, config.model.block_size, config.model.block_size
        )
    except UserError:
        return None
    return list(np.asarray(window[0][:-1], dtype=np.int64).tolist())


def pick(asked: Sequence[int], count: int, what: str, default: Sequence[int]) -> list[int]:
    """The layers or heads asked for, sorted and unique, or the default. AttentionError for one that does not exist."""
    for number in asked:
        if not 0 <= number < count:
            raise AttentionError(f"there is no {what} {number}; fix: 0 to {count - 1}")
    return sorted(set(asked)) or list(default)


def look(
    run: Trained,
    ids: Sequence[int],
    layers: Sequence[int],
    heads: Sequence[int],
    pixels: int = attention_maps.PIXELS,
) -> Look:
    """Measure every layer; compute maps of the chosen heads of the chosen layers, at most `pixels` a side."""
    found = {}
    for layer, (query_HTD, key_HTD) in attention_maps.queries_and_keys(run.model, torch.tensor(ids)).items():
        seen = attention_maps.layer_maps(query_HTD, key_HTD, heads if layer in layers else (), pixels)
        found[layer] = layer_look(seen, run.reciprocal[layer])
    block = attention_maps.pixel_tokens(len(ids), pixels)
    return Look(
        run.name, run.variant, run.seed, run.iteration, len(run.model.blocks), block, found, run.notes
    )


def layer_look(seen: attention_maps.LayerMaps, share: float | None) -> LayerLook:
    """The statistics of a layer as plain data; masses of maps have four digits."""

    def values(name: str, path: str) -> list[float]:
        part = getattr(seen, path) if STATISTICS[name][1] else seen
        return [float(value) for value in getattr(part, name)]

    def lower(masses: Tensor) -> Picture:
        rows: list[list[float]] = masses.tolist()
        return [[float(f"{value:.4g}") for value in row[: place + 1]] for place, row in enumerate(rows)]

    pictures = {head: (lower(one), lower(other)) for head, (one, other) in seen.pictures.items()}
    return LayerLook(share, {key(name, path): values(name, path) for name, path in keys()}, pictures)


def look_at_study(study_dir: Path) -> list[str]:
    """Write attention.json for the report: of each variant the counted run of the lowest seed, on one text.

    Nothing is done if the file has these runs at these iterations already. Returns the errors of runs that failed.
    """
    counted = [run for run in read_runs(study_dir, shown_length(study_dir).length) if run.used]
    first = {run.variant: run for run in reversed(counted)}  # they are sorted by seed
    chosen = list(first.values())[::-1]
    kept = read_study(study_dir)
    wanted = {(run.name, run.record["progress"]["iterations"]) for run in chosen}
    if not wanted or (kept and {(one.run, one.iteration) for one in kept[0]} == wanted):
        return []
    runs, failed = [], []
    for run in chosen:
        try:
            runs.append(load(study_dir / "runs" / run.name, run.saved_at))
        except UserError as error:
            failed.append(str(error))
    looks, text = [], Text("no run could be read", 0)
    if runs:
        ids, text = choose_text(runs, None)
        deep = min(run.config.model.layers for run in runs)
        looks = [look(run, ids, sorted({0, deep - 1}), [0], PIXELS_OF_REPORT) for run in runs]
    write_study(study_dir, [one for one in looks if one.layers], text)
    return failed
