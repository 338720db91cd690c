"""What the attentions of trained runs look at, on one text: numbers layer by layer, and pictures of chosen heads.

A run's newest checkpoint is read on the CPU in float32, whatever it was trained on; nothing is trained or changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2 import checkpoint, data, record, tokenizer
from gpt2.config import Config, read_symbols
from gpt2.errors import UserError
from gpt2.model import GPT2, learned_scalars
from gpt2.step import build_model
from ra import maps
from ra.names import LEARNED, reciprocal_layers
from ra.settings import AlternationSettings
from ra.variants import variant

# For a run whose data are not here any more.
SENTENCE = (
    "When the last train had left the station, the old clock above the platform struck ten, and the woman who had sold "
    "tickets there for thirty years locked the door of her office, put the key into the pocket of her coat, and walked "
    "home along the river, as she had done every night since the day when the station was opened."
)
STATISTICS = {  # name -> (title, whether each path has its own)
    "total_variation": ("total variation between the paths", False),
    "jensen_shannon": ("Jensen-Shannon divergence between the paths (bits)", False),
    "entropy": ("entropy (bits)", True),
    "distance": ("mean attention distance (tokens)", True),
    "previous": ("mass on the previous token", True),
    "first": ("mass on the first token", True),
}
PATHS = ("standard", "reciprocal")


class AttentionError(UserError, ValueError):
    """What was asked for is not there to be looked at."""


@dataclass
class Text:
    """The tokens that are looked at, and where they are from."""

    ids: list[int]
    source: str

    def pieces(self) -> list[str]:
        """Each token as a reader sees it."""
        return [tokenizer.load().decode([token]) for token in self.ids]


@dataclass
class Trained:
    """A run's newest checkpoint as a model. reciprocal: each layer's share of that path; None where it has no such."""

    name: str
    variant: str
    seed: int
    iteration: int
    config: Config
    model: GPT2
    reciprocal: list[float | None]
    notes: list[str]


@dataclass
class Seen:
    """A run's maps, layer by layer; layers whose attention has no query and key of the usual kind are absent."""

    run: Trained
    layers: dict[int, maps.LayerMaps]


def load(run_dir: Path) -> Trained:
    """The run in `run_dir`; AttentionError where it has no checkpoint, RecordError and ConfigError as they say."""
    if not run_dir.is_dir():
        raise AttentionError(f"{run_dir} is no folder; right: RUN=results/STUDY/runs/NAME of a run")
    seen = record.load(run_dir)
    symbols = read_symbols(run_dir / "config")
    config = Config.from_symbols(symbols)
    loaded = checkpoint.load_latest(run_dir / "checkpoint")
    if loaded is None:
        raise AttentionError(f"{run_dir} has no checkpoint yet; right: a run that has saved one")
    name = str(seen["variant"])
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
    return Trained(
        seen["run"], name, seen["seed"], loaded.iteration, config, model, shares, loaded.passed_over
    )


def _shares(name: str, model: GPT2, layers: int) -> list[float | None]:
    fixed = reciprocal_layers(name, layers)
    if fixed is not None:
        return [float(layer in fixed) for layer in range(layers)]
    learned = learned_scalars(model).get("alternation_probability", []) if name == LEARNED else []
    return list(learned) if len(learned) == layers else [None] * layers


def choose_text(runs: Sequence[Trained], file: Path | None) -> Text:
    """The file's beginning, or the first validation window of the first run, or a sentence where its data are gone.

    No longer than the shortest block size; AttentionError where the file cannot be read or has less than two tokens.
    """
    longest = min(run.config.model.block_size for run in runs)
    if file is not None:
        try:
            words = file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise AttentionError(
                f"TEXT={file} cannot be read: {error.strerror}; right: a file of text"
            ) from error
        ids = tokenizer.load().encode_ordinary(words)[:longest]
        if len(ids) < 2:
            raise AttentionError(f"TEXT={file} has {len(ids)} tokens; right: at least 2")
        return Text(ids, f"the beginning of {file.name}")
    window = _validation_window(runs[0].config)
    if window is not None:
        return Text(window[:longest], "the first validation window")
    return Text(
        tokenizer.load().encode_ordinary(SENTENCE)[:longest], "a sentence, as the run's data are not here"
    )


def _validation_window(config: Config) -> list[int] | None:
    """Without preparing or downloading anything."""
    try:
        directory, _ = data.corpus_directory(config.data)
        if not directory.is_dir():
            return None
        corpus = data.open_corpus(directory)
        window = data.validation_windows(corpus.validation, config.model.block_size, config.model.block_size)
    except UserError:
        return None
    return list(np.asarray(window[0][:-1], dtype=np.int64).tolist())


def pick(asked: Sequence[int], count: int, what: str, default: Sequence[int]) -> list[int]:
    """The layers or heads asked for, ascending, each once, or the default; AttentionError for one that is not there."""
    for number in asked:
        if not 0 <= number < count:
            raise AttentionError(f"there is no {what} {number}; right: 0 to {count - 1}")
    return sorted(set(asked)) or list(default)


def look(run: Trained, text: Text, layers: Sequence[int], heads: Sequence[int]) -> Seen:
    """Measure every layer; draw the chosen heads of the chosen layers."""
    ids_T = torch.tensor(text.ids)
    found = {}
    for layer, (query_HTD, key_HTD) in maps.queries_and_keys(run.model, ids_T).items():
        found[layer] = maps.measure(query_HTD, key_HTD, heads if layer in layers else ())
    return Seen(run, found)


def used_path(share: float | None) -> str:
    """In words, which path a layer uses."""
    if share is None:
        return "its own attention"
    return {0.0: "standard", 1.0: "reciprocal"}.get(share, f"{100 * share:.1f} % reciprocal")


def statistic(layer: maps.LayerMaps, name: str, path: str) -> Tensor:
    """One of STATISTICS, (H,); `path` matters only where each path has its own."""
    value = getattr(getattr(layer, path), name) if STATISTICS[name][1] else getattr(layer, name)
    assert isinstance(value, Tensor)
    return value


def layer_means(seen: Seen, name: str, path: str) -> dict[int, float]:
    """Layer -> mean over its heads."""
    return {number: float(statistic(layer, name, path).mean()) for number, layer in seen.layers.items()}


def halves(seen: Seen, name: str, path: str) -> tuple[float | None, float | None]:
    """Mean over the early layers (0 .. L/2-1) and over the late ones; None where there is none to speak of."""
    means, middle = layer_means(seen, name, path), len(seen.run.model.blocks) // 2
    parts = ([m for n, m in means.items() if n < middle], [m for n, m in means.items() if n >= middle])
    early, late = (sum(part) / len(part) if part else None for part in parts)
    return early, late


def as_json(seen: Seen, text: Text) -> dict[str, Any]:
    """attention.json of one run: every statistic of every head, and the halves."""
    keys = [
        (name, path, f"{name}_{path}" if own else name)
        for name, (_, own) in STATISTICS.items()
        for path in (PATHS if own else PATHS[:1])
    ]
    return {
        "schema": 1,
        "run": seen.run.name,
        "variant": seen.run.variant,
        "seed": seen.run.seed,
        "iteration": seen.run.iteration,
        "text": {"source": text.source, "tokens": len(text.ids)},
        "layers": [
            {"layer": number, "reciprocal_share": seen.run.reciprocal[number]}
            | {key: [float(value) for value in statistic(layer, name, path)] for name, path, key in keys}
            for number, layer in seen.layers.items()
        ],
        "halves": {
            key: dict(zip(("early", "late"), halves(seen, name, path), strict=True))
            for name, path, key in keys
        },
        "notes": seen.run.notes,
    }
