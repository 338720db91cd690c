"""Read and write attention statistics and maps of runs (attention.json). Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2.system import files
from gpt2.system.errors import UserError
from gpt2.system.read_files import read_json

STATISTICS = {  # name -> (title, whether the value differs between the paths)
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

Picture = list[list[float]]  # row i: attention mass from query block i to key blocks 0 .. i


@dataclass
class InputText:
    """The inspected text. tokens: their number. pieces: the tokens as strings, for a short text only."""

    source: str
    tokens: int
    pieces: list[str] = field(default_factory=list)


@dataclass
class LayerAttention:
    """Statistics and maps of one layer.

    share: weight of the reciprocal path; None for custom attention. numbers: `statistic_key` -> a value for each head.
    pictures: head -> (standard, reciprocal).
    """

    share: float | None
    numbers: dict[str, list[float]]
    pictures: dict[int, tuple[Picture, Picture]] = field(default_factory=dict)


@dataclass
class RunAttention:
    """Attention of one run on one text. depth: layers of the model. layers: number -> statistics.

    A layer without query and key is absent from `layers`. block: tokens for each pixel of a map.
    """

    name: str
    variant: str
    seed: int
    iteration: int
    depth: int
    block: int
    layers: dict[int, LayerAttention]
    notes: list[str] = field(default_factory=list)


def statistic_key(name: str, path: str) -> str:
    """Return the key in `LayerAttention.numbers`; it names the path if the value differs between the paths."""
    return f"{name}_{path}" if STATISTICS[name][1] else name


def statistics_by_path() -> list[tuple[str, str]]:
    """Return every (name, path) with a value; a statistic common to both paths has PATHS[0]."""
    return [
        (name, path)
        for name, (_, by_path) in STATISTICS.items()
        for path in (PATHS if by_path else PATHS[:1])
    ]


def layer_means(run: RunAttention, name: str, path: str) -> dict[int, float]:
    """Return layer -> mean over the heads."""
    found = {number: layer.numbers[statistic_key(name, path)] for number, layer in run.layers.items()}
    return {number: sum(values) / len(values) for number, values in found.items()}


def early_late_means(run: RunAttention, name: str, path: str) -> tuple[float | None, float | None]:
    """Return the means over layers 0 .. L/2-1 and L/2 .. L-1; None if no such layer was measured."""
    means, middle = layer_means(run, name, path), run.depth // 2
    parts = ([m for n, m in means.items() if n < middle], [m for n, m in means.items() if n >= middle])
    early, late = (sum(part) / len(part) if part else None for part in parts)
    return early, late


def used_path(share: float | None) -> str:
    """Name the path that a layer uses."""
    if share is None:
        return "custom attention"
    return {0.0: "standard", 1.0: "reciprocal"}.get(share, f"{100 * share:.1f} % reciprocal")


# ---- files


def as_json(run: RunAttention, text: InputText) -> dict[str, Any]:
    """Return the content of a run's attention.json: all statistics of all heads, without maps."""
    return {
        "schema": SCHEMA,
        "run": run.name,
        "variant": run.variant,
        "seed": run.seed,
        "iteration": run.iteration,
        "text": {"source": text.source, "tokens": text.tokens},
        "layers": [
            {"layer": number, "reciprocal_share": layer.share} | layer.numbers
            for number, layer in run.layers.items()
        ],
        "halves": {
            statistic_key(name, path): dict(
                zip(("early", "late"), early_late_means(run, name, path), strict=True)
            )
            for name, path in statistics_by_path()
        },
        "notes": run.notes,
    }


def write_study(study_dir: Path, runs: Sequence[RunAttention], text: InputText) -> None:
    """Write attention.json of a study, with the maps for its report."""
    rows = [
        as_json(run, text)
        | {
            "depth": run.depth,
            "block": run.block,
            "pictures": [
                {"layer": number, "head": head, **dict(zip(PATHS, pair, strict=True))}
                for number, layer in run.layers.items()
                for head, pair in layer.pictures.items()
            ],
        }
        for run in runs
    ]
    source = {"source": text.source, "tokens": text.tokens, "pieces": text.pieces}
    value = files.finite({"schema": SCHEMA, "text": source, "runs": rows})
    files.write_text(study_dir / FILE, json.dumps(value, allow_nan=False) + "\n")  # on one line: it is large


def read_study(study_dir: Path) -> tuple[list[RunAttention], InputText] | None:
    """Read attention.json of a study; None if it does not exist or is not valid."""
    try:
        found = read_json(study_dir / FILE)
        if found["schema"] != SCHEMA:
            return None
        source = found["text"]
        text = InputText(
            str(source["source"]), int(source["tokens"]), [str(piece) for piece in source["pieces"]]
        )
        return [_read_run(run, text.tokens) for run in found["runs"]], text
    except (
        FileNotFoundError,
        UserError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ZeroDivisionError,
    ):
        return None


def _read_run(run: dict[str, Any], tokens: int) -> RunAttention:
    wanted = [statistic_key(name, path) for name, path in statistics_by_path()]
    layers = {
        int(row["layer"]): LayerAttention(
            None if row["reciprocal_share"] is None else _finite(row["reciprocal_share"]),
            {name: [_finite(value) for value in row[name]] for name in wanted},
        )
        for row in run["layers"]
    }
    heads = {len(values) for layer in layers.values() for values in layer.numbers.values()}
    if len(heads) != 1 or 0 in heads:
        raise ValueError("layers have different numbers of heads")
    block = int(run["block"])
    for drawn in run["pictures"]:
        standard, reciprocal = (_picture(drawn[path], -(-tokens // block)) for path in PATHS)
        layers[int(drawn["layer"])].pictures[int(drawn["head"])] = (standard, reciprocal)
    return RunAttention(
        str(run["run"]), str(run["variant"]), int(run["seed"]), int(run["iteration"]), int(run["depth"]),
        block, layers, [str(line) for line in run["notes"]],
    )  # fmt: skip


def _picture(rows: list[list[float]], side: int) -> Picture:
    if [len(row) for row in rows] != list(range(1, side + 1)):
        raise ValueError("the shape of a map does not fit the text")
    return [[_finite(value) for value in row] for row in rows]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return float(value)
