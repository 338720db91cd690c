"""Pictures of attention as plain data for `pages.html`: both paths of chosen heads, in colours. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pages.html import Figure, text
from study.attention.data import PATHS, Look, Picture, Text, used_path

FLOOR = 1e-4  # of a picture's colours as mass: less looks like none
SIDE, GAP = 330, 84  # pixels on the screen
SPANS = (1, 6)  # powers of two that the colours against an even spread may reach
DIVERGING = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f4f4f2"], [0.75, "#f4a582"], [1, "#b2182b"]]
COLOURS = ("against an even spread", "mass")
ABOUT_PICTURES = (
    "A row is a query position, a column a key position at or before it. Against an even spread, blue is less mass "
    "than every position alike would get and red is more. Long texts are shown in blocks of tokens."
)
ABOUT_MASS = f"As mass, dark is {FLOOR:g} or less and bright is all of it, on a logarithmic scale."


def places(seen: Sequence[Look]) -> dict[tuple[int, int], list[Look]]:
    """(layer, head) -> the runs with a picture of it."""
    found: dict[tuple[int, int], list[Look]] = {}
    for one in seen:
        for number, layer in one.layers.items():
            for head in layer.pictures:
                found.setdefault((number, head), []).append(one)
    return dict(sorted(found.items()))


def picture(seen: Sequence[Look], layer: int, head: int, text_seen: Text) -> tuple[Figure, int]:
    """Heat maps side by side, queries downwards, keys to the right; the powers of two that the colours reach."""
    even = even_spread(text_seen.tokens, seen[0].block)
    reach = _reach(seen, layer, head, even)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"height": (SIDE + GAP) * len(seen) + 20, "annotations": []}
    layout["margin"] = {"l": 56, "r": 12, "t": 8, "b": 24}
    options: list[dict[str, Any]] = [{"name": name, "data": []} for name in COLOURS]
    high = 1 / len(seen)
    for row, one in enumerate(seen):
        bottom = 1 - (row + 1) * high
        top = bottom + high * SIDE / (SIDE + GAP)
        for column, path in enumerate(PATHS):
            number = 2 * row + column + 1
            masses = one.layers[layer].pictures[head][column]
            colours = _colours(masses, even, reach)
            data.append(_heat(masses, one.block, text_seen, number) | colours[0])
            for option, own in zip(options, colours, strict=True):
                option["data"].append(own)
            layout |= _axes(number, column, bottom, top)
            layout["annotations"].append(_title(one, layer, column, path, top))
    return {
        "data": data,
        "layout": layout,
        "narrow": {"font": {"size": 10}, "margin": {"l": 36, "r": 4}},
        "choices": [{"label": "Colour", "options": options}],
    }, reach


def _axes(number: int, column: int, bottom: float, top: float) -> dict[str, Any]:
    """Of the heat map so numbered, in its column and between two heights."""
    suffix, left = _suffix(number), 0.53 * column
    axis = {"showgrid": False, "zeroline": False, "constrain": "domain", "nticks": 6}
    return {
        f"xaxis{suffix}": axis | {"domain": [left, left + 0.47], "anchor": f"y{suffix}"},
        f"yaxis{suffix}": axis | {
            "domain": [bottom, top], "anchor": f"x{suffix}", "autorange": "reversed", "scaleanchor": f"x{suffix}",
        },
    }  # fmt: skip


def _suffix(number: int) -> str:
    """As plotly numbers its axes."""
    return "" if number == 1 else str(number)


def _title(one: Look, layer: int, column: int, path: str, top: float) -> dict[str, Any]:
    share = one.layers[layer].share
    mark = " (used)" if share is not None and share == float(column) else ""
    return {
        "text": f"{text(one.run)}: {path}{mark}", "xref": "paper", "yref": "paper", "x": 0.53 * column + 0.235,
        "xanchor": "center", "y": top, "yanchor": "bottom", "showarrow": False, "yshift": 6,
    }  # fmt: skip


def _heat(masses: Picture, block: int, text_seen: Text, number: int) -> dict[str, Any]:
    """The axes and what the pointer tells; the colours are those of `_colours`."""
    at = [place * block for place in range(len(masses))]
    trace: dict[str, Any] = {
        "type": "heatmap", "x": at, "y": at, "xaxis": f"x{_suffix(number)}", "yaxis": f"y{_suffix(number)}",
        "showscale": False, "hoverongaps": False, "hovertemplate": "query %{y}, key %{x}: %{z}<extra></extra>",
    }  # fmt: skip
    if len(text_seen.pieces) == len(masses):
        pieces = [text(piece) or "·" for piece in text_seen.pieces]
        trace["text"] = [[f"{own} → {other}" for other in pieces] for own in pieces]
        trace["hovertemplate"] = "%{text}: %{z}<extra></extra>"
    return trace


def one_by_one(seen: Sequence[Look], layer: int, head: int, text_seen: Text) -> Figure:
    """The two paths of one run at a time, in colours that are the same for all; a switch goes through the runs."""
    even = even_spread(text_seen.tokens, seen[0].block)
    reach = _reach(seen, layer, head, even)
    options = []
    for one in seen:
        pair = one.layers[layer].pictures[head]
        shown = [_colours(masses, even, reach)[0] for masses in pair]
        titles = [_title(one, layer, column, path, 1.0) for column, path in enumerate(PATHS)]
        uses = used_path(one.layers[layer].share)
        name = f"{one.variant} ({uses})" if "%" in uses else one.variant
        options.append({"name": name, "data": shown, "layout": {"annotations": titles}})
    first = seen[0].layers[layer].pictures[head]
    data = [_heat(masses, seen[0].block, text_seen, number) for number, masses in enumerate(first, 1)]
    layout = {"height": SIDE + 60, "margin": {"l": 56, "r": 12, "t": 32, "b": 24}}
    for column in range(2):
        layout |= _axes(column + 1, column, 0.0, 1.0)
    return {
        "data": data,
        "layout": layout,
        "narrow": {"font": {"size": 10}, "margin": {"l": 36, "r": 4}},
        "choices": [{"label": "Variant", "options": options}],
    }


# ---- colours


def even_spread(tokens: int, block: int) -> NDArray[np.float64]:
    """The picture (N, N) of attention that gives every position before it the same, `block` tokens to a pixel."""
    rows = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    starts = np.arange(0, tokens, block)
    sums: NDArray[np.float64] = np.add.reduceat(np.add.reduceat(rows, starts, axis=1), starts, axis=0)
    return sums / np.diff(np.append(starts, tokens))[:, None]


def ratios(masses: Picture, even: NDArray[np.float64]) -> Picture:
    """Mass against an even spread in powers of two."""
    return [
        [math.log2(max(mass, 1e-30) / max(float(even[i, j]), 1e-30)) for j, mass in enumerate(row)]
        for i, row in enumerate(masses)
    ]


def _reach(seen: Sequence[Look], layer: int, head: int, even: NDArray[np.float64]) -> int:
    """How many powers of two the colours need for all but a hundredth of the pixels."""
    drawn = [path for one in seen for path in one.layers[layer].pictures[head]]
    values = sorted(abs(value) for masses in drawn for row in ratios(masses, even) for value in row)
    needed = math.ceil(values[int(0.99 * (len(values) - 1))])
    return min(max(needed, SPANS[0]), SPANS[1])


def _colours(masses: Picture, even: NDArray[np.float64], reach: int) -> list[dict[str, Any]]:
    """For each of COLOURS the values and their scale; nothing above the diagonal, which is the future."""
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
