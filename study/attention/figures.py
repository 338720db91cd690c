"""Attention maps of chosen heads as heat maps for plotly, both paths side by side. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pages.markup import escape_figure
from study.attention.data import PATHS, InputText, Picture, RunAttention, used_path

FLOOR = 1e-4  # smaller masses share the darkest color
SIDE, GAP = 330, 84  # pixels on the screen
SPANS = (1, 6)  # limits of the color scale against an even spread, in powers of two
DIVERGING = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f4f4f2"], [0.75, "#f4a582"], [1, "#b2182b"]]
SCALES = ("against an even spread", "mass")
ABOUT_MAPS = (
    'A row is a query position. A column is a key position at or before it. Under "against an even spread", blue is '
    "less mass and red is more mass than uniform attention gives. In long texts one cell is a block of tokens."
)
ABOUT_MASS = f'Under "mass", dark is {FLOOR:g} or less and bright is 1, on a logarithmic scale.'


def heads_with_maps(runs: Sequence[RunAttention]) -> dict[tuple[int, int], list[RunAttention]]:
    """(layer, head) -> the runs with a map of it."""
    found: dict[tuple[int, int], list[RunAttention]] = {}
    for run in runs:
        for number, layer in run.layers.items():
            for head in layer.pictures:
                found.setdefault((number, head), []).append(run)
    return dict(sorted(found.items()))


def maps_of_runs(
    runs: Sequence[RunAttention], layer: int, head: int, text: InputText
) -> tuple[dict[str, Any], int]:
    """One row of heat maps for each run, and the powers of two that the colors reach."""
    even = even_spread(text.tokens, runs[0].block)
    reach = _reach(runs, layer, head, even)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"height": (SIDE + GAP) * len(runs) + 20, "annotations": []}
    layout["margin"] = {"l": 56, "r": 12, "t": 8, "b": 24}
    options: list[dict[str, Any]] = [{"name": name, "data": []} for name in SCALES]
    high = 1 / len(runs)
    for row, run in enumerate(runs):
        bottom = 1 - (row + 1) * high
        top = bottom + high * SIDE / (SIDE + GAP)
        for column, path in enumerate(PATHS):
            number = 2 * row + column + 1
            masses = run.layers[layer].pictures[head][column]
            scales = _color_scales(masses, even, reach)
            data.append(_heat(masses, run.block, text, number) | scales[0])
            for option, scale in zip(options, scales, strict=True):
                option["data"].append(scale)
            layout |= _axes(number, column, bottom, top)
            layout["annotations"].append(_title(run, layer, column, path, top))
    return {
        "data": data,
        "layout": layout,
        "narrow": {"font": {"size": 10}, "margin": {"l": 36, "r": 4}},
        "choices": [{"label": "Color", "options": options}],
    }, reach


def _axes(number: int, column: int, bottom: float, top: float) -> dict[str, Any]:
    """Axes of heat map `number`, in its column and between two heights."""
    suffix, left = _suffix(number), 0.53 * column
    axis = {"showgrid": False, "zeroline": False, "constrain": "domain", "nticks": 6}
    return {
        f"xaxis{suffix}": axis | {"domain": [left, left + 0.47], "anchor": f"y{suffix}"},
        f"yaxis{suffix}": axis | {
            "domain": [bottom, top], "anchor": f"x{suffix}", "autorange": "reversed", "scaleanchor": f"x{suffix}",
        },
    }  # fmt: skip


def _suffix(number: int) -> str:
    """The suffix of plotly's axis `number`."""
    return "" if number == 1 else str(number)


def _title(run: RunAttention, layer: int, column: int, path: str, top: float) -> dict[str, Any]:
    share = run.layers[layer].share
    mark = " (used)" if share is not None and share == float(column) else ""
    return {
        "text": f"{escape_figure(run.name)}: {path}{mark}", "xref": "paper", "yref": "paper",
        "x": 0.53 * column + 0.235, "xanchor": "center", "y": top, "yanchor": "bottom", "showarrow": False, "yshift": 6,
    }  # fmt: skip


def _heat(masses: Picture, block: int, text: InputText, number: int) -> dict[str, Any]:
    """Positions and hover texts. `_color_scales` adds the values."""
    at = [place * block for place in range(len(masses))]
    trace: dict[str, Any] = {
        "type": "heatmap", "x": at, "y": at, "xaxis": f"x{_suffix(number)}", "yaxis": f"y{_suffix(number)}",
        "showscale": False, "hoverongaps": False, "hovertemplate": "query %{y}, key %{x}: %{z}<extra></extra>",
    }  # fmt: skip
    if len(text.pieces) == len(masses):
        pieces = [escape_figure(piece) or "·" for piece in text.pieces]
        trace["text"] = [[f"{query} → {key}" for key in pieces] for query in pieces]
        trace["hovertemplate"] = "%{text}: %{z}<extra></extra>"
    return trace


def map_by_variant(runs: Sequence[RunAttention], layer: int, head: int, text: InputText) -> dict[str, Any]:
    """The two paths of one run at a time, on one color scale. A switch selects the run."""
    even = even_spread(text.tokens, runs[0].block)
    reach = _reach(runs, layer, head, even)
    options = []
    for run in runs:
        pair = run.layers[layer].pictures[head]
        shown = [_color_scales(masses, even, reach)[0] for masses in pair]
        titles = [_title(run, layer, column, path, 1.0) for column, path in enumerate(PATHS)]
        uses = used_path(run.layers[layer].share)
        name = f"{run.variant} ({uses})" if "%" in uses else run.variant
        options.append({"name": name, "data": shown, "layout": {"annotations": titles}})
    first = runs[0].layers[layer].pictures[head]
    data = [_heat(masses, runs[0].block, text, number) for number, masses in enumerate(first, 1)]
    layout = {"height": SIDE + 60, "margin": {"l": 56, "r": 12, "t": 32, "b": 24}}
    for column in range(2):
        layout |= _axes(column + 1, column, 0.0, 1.0)
    return {
        "data": data,
        "layout": layout,
        "narrow": {"font": {"size": 10}, "margin": {"l": 36, "r": 4}},
        "choices": [{"label": "Variant", "options": options}],
    }


# ---- color scales


def even_spread(tokens: int, block: int) -> NDArray[np.float64]:
    """The map (N, N) of uniform causal attention, `block` tokens a cell."""
    rows = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    starts = np.arange(0, tokens, block)
    sums: NDArray[np.float64] = np.add.reduceat(np.add.reduceat(rows, starts, axis=1), starts, axis=0)
    return sums / np.diff(np.append(starts, tokens))[:, None]


def ratios(masses: Picture, even: NDArray[np.float64]) -> Picture:
    """log2 of the mass over that of an even spread."""
    return [
        [math.log2(max(mass, 1e-30) / max(float(even[i, j]), 1e-30)) for j, mass in enumerate(row)]
        for i, row in enumerate(masses)
    ]


def _reach(runs: Sequence[RunAttention], layer: int, head: int, even: NDArray[np.float64]) -> int:
    """Powers of two that cover 99 % of the cells."""
    drawn = [path for run in runs for path in run.layers[layer].pictures[head]]
    values = sorted(abs(value) for masses in drawn for row in ratios(masses, even) for value in row)
    needed = math.ceil(values[int(0.99 * (len(values) - 1))])
    return min(max(needed, SPANS[0]), SPANS[1])


def _color_scales(masses: Picture, even: NDArray[np.float64], reach: int) -> list[dict[str, Any]]:
    """Values and color scale for each of SCALES. Cells above the diagonal (the future) are empty."""
    bound = 2 * SPANS[1]
    ratio = [[min(max(value, -bound), bound) for value in row] for row in ratios(masses, even)]
    mass = [[math.log10(max(value, FLOOR)) for value in row] for row in masses]
    return [
        {"z": _square(ratio), "zmin": -reach, "zmax": reach, "colorscale": DIVERGING},
        {"z": _square(mass), "zmin": math.log10(FLOOR), "zmax": 0, "colorscale": "Viridis"},
    ]


def _square(rows: Picture) -> list[list[float | None]]:
    empty: list[None] = [None] * len(rows)
    return [[*(round(value, 2) for value in row), *empty[len(row) :]] for row in rows]
