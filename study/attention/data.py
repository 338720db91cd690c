"""Attention statistics and maps of runs as plain data, saved in attention.json. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2.system import files

STATISTICS = {  # name -> (title, whether each path has a value)
    "total_variation": ("total variation between the paths", False),
    "jensen_shannon": ("Jensen-Shannon divergence between the paths (bits)", False),
    "entropy": ("entropy (bits)", True),
    "distance": ("mean attention distance (tokens)", True),
    "previous": ("mass on the previous token", True),
    "first": ("mass on the first token", True),
}
PATHS = ("standard", "reciprocal")
SCHEMA = 1
FILE = "attention.json"

Picture = list[list[float]]  # row i: the mass that a block of queries gives to the blocks of keys 0 .. i


@dataclass
class Text:
    """The text that was read: its source and its number of tokens. pieces: the tokens as strings, of a short text."""

    source: str
    tokens: int
    pieces: list[str] = field(default_factory=list)


@dataclass
class LayerLook:
    """Statistics and maps of one layer.

    share: of the reciprocal path, None without that path. numbers: by `key`, one for each head. pictures: head ->
    (standard, reciprocal).
    """

    share: float | None
    numbers: dict[str, list[float]]
    pictures: dict[int, tuple[Picture, Picture]] = field(default_factory=dict)


@dataclass
class Look:
    """Attention of one run on one text. depth: layers of the model. layers: those with a query and a key.

    block: tokens for each pixel of a map.
    """

    run: str
    variant: str
    seed: int
    iteration: int
    depth: int
    block: int
    layers: dict[int, LayerLook]
    notes: list[str] = field(default_factory=list)


def key(name: str, path: str) -> str:
    """The key of a statistic in `LayerLook.numbers`; it contains the path if each path has a value."""
    return f"{name}_{path}" if STATISTICS[name][1] else name


def keys() -> list[tuple[str, str]]:
    """Every (name, path) that has a number."""
    return [(name, path) for name, (_, own) in STATISTICS.items() for path in (PATHS if own else PATHS[:1])]


def layer_means(look: Look, name: str, path: str) -> dict[int, float]:
    """Layer -> mean over the heads."""
    found = {number: layer.numbers[key(name, path)] for number, layer in look.layers.items()}
    return {number: sum(values) / len(values) for number, values in found.items()}


def halves(look: Look, name: str, path: str) -> tuple[float | None, float | None]:
    """Mean over the early layers (0 .. L/2-1) and over the late layers; None for a half without layers."""
    means, middle = layer_means(look, name, path), look.depth // 2
    parts = ([m for n, m in means.items() if n < middle], [m for n, m in means.items() if n >= middle])
    early, late = (sum(part) / len(part) if part else None for part in parts)
    return early, late


def used_path(share: float | None) -> str:
    """The path that a layer uses, in words."""
    if share is None:
        return "its own attention"
    return {0.0: "standard", 1.0: "reciprocal"}.get(share, f"{100 * share:.1f} % reciprocal")


# ---- files


def as_json(look: Look, text: Text) -> dict[str, Any]:
    """The content of a run's attention.json: every statistic of every head and both halves, without maps."""
    return {
        "schema": SCHEMA,
        "run": look.run,
        "variant": look.variant,
        "seed": look.seed,
        "iteration": look.iteration,
        "text": {"source": text.source, "tokens": text.tokens},
        "layers": [
            {"layer": number, "reciprocal_share": layer.share} | layer.numbers
            for number, layer in look.layers.items()
        ],
        "halves": {
            key(name, path): dict(zip(("early", "late"), halves(look, name, path), strict=True))
            for name, path in keys()
        },
        "notes": look.notes,
    }


def write_study(study_dir: Path, looks: Sequence[Look], text: Text) -> None:
    """Write attention.json of a study, with the maps of its report."""
    runs = [
        as_json(look, text)
        | {
            "depth": look.depth,
            "block": look.block,
            "pictures": [
                {"layer": number, "head": head, **dict(zip(PATHS, pair, strict=True))}
                for number, layer in look.layers.items()
                for head, pair in layer.pictures.items()
            ],
        }
        for look in looks
    ]
    told = {"source": text.source, "tokens": text.tokens, "pieces": text.pieces}
    value = files.finite({"schema": SCHEMA, "text": told, "runs": runs})
    files.write_text(study_dir / FILE, json.dumps(value, allow_nan=False) + "\n")  # on one line: it is large


def read_study(study_dir: Path) -> tuple[list[Look], Text] | None:
    """Read the file of `write_study`; None if it does not exist or is not valid."""
    try:
        found = json.loads((study_dir / FILE).read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            return None
        told = found["text"]
        text = Text(str(told["source"]), int(told["tokens"]), [str(piece) for piece in told["pieces"]])
        return [_look(run, text.tokens) for run in found["runs"]], text
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        ZeroDivisionError,
    ):
        return None


def _look(run: dict[str, Any], tokens: int) -> Look:
    wanted = [key(name, path) for name, path in keys()]
    layers = {
        int(row["layer"]): LayerLook(
            None if row["reciprocal_share"] is None else _finite(row["reciprocal_share"]),
            {name: [_finite(value) for value in row[name]] for name in wanted},
        )
        for row in run["layers"]
    }
    heads = {len(values) for layer in layers.values() for values in layer.numbers.values()}
    if len(heads) != 1 or 0 in heads:
        raise ValueError("a layer has not one number for each head")
    block = int(run["block"])
    for drawn in run["pictures"]:
        standard, reciprocal = (_picture(drawn[path], -(-tokens // block)) for path in PATHS)
        layers[int(drawn["layer"])].pictures[int(drawn["head"])] = (standard, reciprocal)
    return Look(
        str(run["run"]), str(run["variant"]), int(run["seed"]), int(run["iteration"]), int(run["depth"]),
        block, layers, [str(line) for line in run["notes"]],
    )  # fmt: skip


def _picture(rows: list[list[float]], side: int) -> Picture:
    if [len(row) for row in rows] != list(range(1, side + 1)):
        raise ValueError("a map is not the triangle of the text")
    return [[_finite(value) for value in row] for row in rows]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return float(value)
