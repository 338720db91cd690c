"""Attention of trained runs as figures for plotly: statistics by layer, and maps of heads. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from referee.pages.markup import escape_html
from referee.pages.plots import Plain, axis, figure, line
from study.arm_colors import color
from study.attention.data import (
    PATHS,
    STATISTICS,
    AttentionMap,
    InputText,
    Masses,
    RunAttention,
    layer_means,
    used_path,
)

Matrix = NDArray[np.float64]
FLOOR = 1e-4  # smaller masses share the darkest color
SIDE = 330  # pixels on the screen
SPANS = (1, 6)  # limits of the color scale against an even spread, in powers of two
DIVERGING = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f4f4f2"], [0.75, "#f4a582"], [1, "#b2182b"]]
SCALES = ("against an even spread", "mass")
ABOUT_MAPS = (
    'A row is a query position. A column is a key position at or before it. Under "against an even spread", blue is '
    "less mass and red is more mass than uniform attention gives. In long texts one cell is a block of tokens."
)
ABOUT_MASS = f'Under "mass", dark is {FLOOR:g} or less and bright is 1, on a logarithmic scale.'
SHORT = {
    "total_variation": "total variation", "jensen_shannon": "Jensen-Shannon", "entropy": "entropy",
    "distance": "distance", "previous": "previous token", "first": "first token",
}  # fmt: skip


def layer_figure(runs: Sequence[RunAttention], variants: Sequence[str]) -> Plain:
    """One line for each run and path against the layer. The reader chooses the statistic."""
    lines = [(run, path) for run in runs for path in PATHS]
    data = [
        line(
            f"{run.name}, {path}",
            color(run.variant, variants),
            run.variant,
            label=run.variant if path == PATHS[0] else "",
            dash="solid" if path == PATHS[0] else "dash",
            marker={"size": 6},
            x=[layer.layer for layer in run.layers],
            y=[],
        )
        for run, path in lines
    ]
    options = []
    for name, (title, by_path) in STATISTICS.items():
        shown = [layer_means(run, name, path) if by_path or path == PATHS[0] else {} for run, path in lines]
        values = [{"y": [float(f"{value:.4g}") for value in means.values()]} for means in shown]
        options.append({"name": SHORT[name], "data": values, "layout": {"yaxis": axis(title)}})
    narrow = {"margin": {"l": 62, "r": 74}, "height": 320}
    choices = [{"label": "Statistic", "options": options}]
    across, upwards = axis("layer", dtick=1), {"rangemode": "tozero"}
    return figure(data, 380, (66, 84, 12, 48), narrow, choices, xaxis=across, yaxis=upwards)


RunMap = tuple[RunAttention, AttentionMap]


def maps_by_head(runs: Sequence[RunAttention]) -> dict[tuple[int, int], list[RunMap]]:
    """(layer, head) -> the runs with a map of it."""
    found: dict[tuple[int, int], list[RunMap]] = {}
    for run in runs:
        for drawn in run.pictures:
            found.setdefault((drawn.layer, drawn.head), []).append((run, drawn))
    return dict(sorted(found.items()))


def map_figure(
    drawn_runs: Sequence[RunMap], text: InputText, scales: Sequence[str] = SCALES
) -> tuple[Plain, int]:
    """The two paths of one run at a time as heat maps of one head, and the powers of two that the colors reach.

    Switches choose the run and the color scale. The color scales are those of all runs.
    """
    block = drawn_runs[0][0].block
    even = even_spread(text.tokens, block)
    maps = [(drawn.standard, drawn.reciprocal) for _, drawn in drawn_runs]
    lower = np.tril_indices(len(even))
    distances = np.sort([abs(ratios(masses, even)[lower]) for pair in maps for masses in pair], axis=None)
    reach = min(max(math.ceil(distances[int(0.99 * (len(distances) - 1))]), SPANS[0]), SPANS[1])
    colors: dict[str, Plain] = {
        SCALES[0]: {"zmin": -reach, "zmax": reach, "colorscale": DIVERGING},
        SCALES[1]: {"zmin": math.log10(FLOOR), "zmax": 0, "colorscale": "Viridis"},
    }
    drawn = [(scale, column) for scale in scales for column in range(2)]
    data = [_heat(column, len(even), block, text) | colors[scale] for scale, column in drawn]
    options = []
    for (run, one), pair in zip(drawn_runs, maps, strict=True):
        share = run.share(one.layer)
        uses = used_path(share)
        options.append({
            "name": f"{run.name} ({uses})" if "%" in uses else run.name,
            "data": [{"z": _cells(pair[column], even, scale)} for scale, column in drawn],
            "layout": {"annotations": [_title(run.name, column, share) for column in range(2)]},
        })  # fmt: skip
    shown = [{"name": scale, "data": [{"visible": other == scale} for other, _ in drawn]} for scale in scales]
    choices = [{"label": "Run", "options": options}, {"label": "Color", "options": shown}]
    narrow = {"font": {"size": 10}, "margin": {"l": 36, "r": 4}}
    axes = {name: values for column in range(2) for name, values in _axes(column).items()}
    return figure(data, SIDE + 60, (56, 12, 32, 24), narrow, choices, **axes), reach


def _axes(column: int) -> dict[str, Plain]:
    number, left = "2" if column else "", 0.53 * column
    both = {"showgrid": False, "zeroline": False, "constrain": "domain", "nticks": 6}
    across = both | {"domain": [left, left + 0.47], "anchor": f"y{number}"}
    down = both | {"anchor": f"x{number}", "autorange": "reversed", "scaleanchor": f"x{number}"}
    return {f"xaxis{number}": across, f"yaxis{number}": down}


def _title(run: str, column: int, share: float | None) -> Plain:
    text = f"{escape_html(run)}: {PATHS[column]}{' (used)' if share == column else ''}"
    place = {"x": 0.53 * column + 0.235, "xanchor": "center", "y": 1, "yanchor": "bottom", "yshift": 6}
    return {"text": text, "xref": "paper", "yref": "paper", "showarrow": False} | place


def _heat(column: int, cells: int, block: int, text: InputText) -> Plain:
    """Positions and hover texts of a map."""
    at, number = [place * block for place in range(cells)], "2" if column else ""
    heat: Plain = {"type": "heatmap", "x": at, "y": at, "xaxis": f"x{number}", "yaxis": f"y{number}"}
    heat |= {
        "showscale": False,
        "hoverongaps": False,
        "hovertemplate": "query %{y}, key %{x}: %{z}<extra></extra>",
    }
    if len(text.pieces) == cells:
        pieces = [escape_html(piece) or "·" for piece in text.pieces]
        heat["text"] = [[f"{query} → {key}" for key in pieces] for query in pieces]
        heat["hovertemplate"] = "%{text}: %{z}<extra></extra>"
    return heat


def even_spread(tokens: int, block: int) -> Matrix:
    """The map (N, N) of uniform causal attention, `block` tokens a cell."""
    rows = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    starts = np.arange(0, tokens, block)
    sums: Matrix = np.add.reduceat(np.add.reduceat(rows, starts, axis=1), starts, axis=0)
    return sums / np.diff(np.append(starts, tokens))[:, None]


def ratios(masses: Masses, even: Matrix) -> Matrix:
    """log2 of the mass over that of an even spread; 0 above the diagonal."""
    ratio: Matrix = np.log2(np.maximum(_matrix(masses), 1e-30) / np.maximum(even, 1e-30))
    return ratio


def _matrix(rows: Masses) -> Matrix:
    matrix = np.zeros((len(rows), len(rows)))
    matrix[np.tril_indices(len(rows))] = [mass for row in rows for mass in row]
    return matrix


def _cells(masses: Masses, even: Matrix, scale: str) -> list[list[float]]:
    """The values of a color scale. A row ends at the diagonal: what follows is the future."""
    if scale == SCALES[0]:
        values = np.clip(ratios(masses, even), -2 * SPANS[1], 2 * SPANS[1])
    else:
        values = np.log10(np.maximum(_matrix(masses), FLOOR))
    rows: list[list[float]] = np.round(values, 2).tolist()
    return [row[: place + 1] for place, row in enumerate(rows)]
