"""Attention of trained runs: statistics by layer, then maps of the chosen heads for both paths.

Builds attention.html. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, field
from numpy.typing import NDArray

from ra.arms import control_groups, one_class
from referee.pages.document import (
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Paragraph,
    Section,
    Table,
)
from referee.pages.figures import Plain, axis, figure, line
from referee.pages.markup import Text, escape_html, pieces
from runtime import records, run_record
from runtime.records import Record
from study.arm_colors import color, color_label, legend

# Attention statistics and maps of runs, and attention.json. Needs no torch.


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

Numbers = tuple[float, ...]  # a value for each head
Masses = tuple[tuple[float, ...], ...]  # row i: attention mass from query block i to key blocks 0 .. i


class InputText(Record, frozen=True):
    """The inspected text. tokens: their number. pieces: the tokens as strings, for a short text only."""

    source: str
    tokens: int
    pieces: tuple[str, ...] = ()


class LayerAttention(Record, frozen=True):
    """Statistics of one layer. reciprocal_share: weight of the reciprocal path; None for custom attention."""

    layer: int
    reciprocal_share: float | None
    total_variation: Numbers
    jensen_shannon: Numbers
    entropy_standard: Numbers
    entropy_reciprocal: Numbers
    distance_standard: Numbers
    distance_reciprocal: Numbers
    previous_standard: Numbers
    previous_reciprocal: Numbers
    first_standard: Numbers
    first_reciprocal: Numbers


class AttentionMap(Record, frozen=True):
    """Both paths of one head."""

    layer: int
    head: int
    standard: Masses
    reciprocal: Masses


class RunAttention(Record, frozen=True):
    """Attention of one run on one text. depth: layers of the model. block: tokens for each cell of a map.

    A layer without query and key is absent from `layers`.
    """

    name: str = field(name="run")
    variant: str
    seed: int
    iteration: int
    depth: int
    block: Annotated[int, Meta(ge=1)]
    layers: tuple[LayerAttention, ...]
    pictures: tuple[AttentionMap, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = [statistic_key(name, path) for name, path in statistics_by_path()]
        heads = {len(getattr(layer, key)) for layer in self.layers for key in keys}
        if len(heads) > 1 or 0 in heads:
            raise ValueError("layers have different numbers of heads")

    def share(self, number: int) -> float | None:
        """The weight of the reciprocal path in a layer."""
        return next(layer.reciprocal_share for layer in self.layers if layer.layer == number)


def statistic_key(name: str, path: str) -> str:
    """Return the field of `LayerAttention`; it names the path if the value differs between the paths."""
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
    found = {layer.layer: getattr(layer, statistic_key(name, path)) for layer in run.layers}
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


def write(folder: Path, runs: Sequence[RunAttention], text: InputText) -> None:
    """Write attention.json of a run."""
    value = {"schema": SCHEMA, "text": text.to_json(), "runs": [run.to_json() for run in runs]}
    records.write(
        folder / FILE, value, run_record.owner(run_record.load(folder)), indent=None
    )  # on one line: it is large


Matrix = NDArray[np.float64]
SIDE = 330  # pixels on the screen
SPANS = (1, 6)  # limits of the color scale against an even spread, in powers of two
DIVERGING = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f4f4f2"], [0.75, "#f4a582"], [1, "#b2182b"]]
ABOUT_MAPS = (
    "A row is a query position. A column is a key position at or before it. Blue is less mass and red is more mass "
    "than uniform attention gives. In long texts one cell is a block of tokens."
)
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


def map_figure(drawn_runs: Sequence[RunMap], text: InputText) -> tuple[Plain, int]:
    """The two paths of one run at a time as heat maps of one head, and the powers of two that the colors reach.

    A switch chooses the run. The color scale is that of all runs.
    """
    block = drawn_runs[0][0].block
    even = even_spread(text.tokens, block)
    maps = [(drawn.standard, drawn.reciprocal) for _, drawn in drawn_runs]
    lower = np.tril_indices(len(even))
    distances = np.sort([abs(ratios(masses, even)[lower]) for pair in maps for masses in pair], axis=None)
    reach = min(max(math.ceil(distances[int(0.99 * (len(distances) - 1))]), SPANS[0]), SPANS[1])
    colors = {"zmin": -reach, "zmax": reach, "colorscale": DIVERGING}
    data = [_heat(column, len(even), block, text) | colors for column in range(2)]
    options = []
    for (run, one), pair in zip(drawn_runs, maps, strict=True):
        share = run.share(one.layer)
        uses = used_path(share)
        options.append({
            "name": f"{run.name} ({uses})" if "%" in uses else run.name,
            "data": [{"z": _cells(masses, even)} for masses in pair],
            "layout": {"annotations": [_title(run.name, column, share) for column in range(2)]},
        })  # fmt: skip
    narrow = {"font": {"size": 10}, "margin": {"l": 36, "r": 4}}
    axes = {name: values for column in range(2) for name, values in _axes(column).items()}
    choices = [{"label": "Run", "options": options}]
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


def _cells(masses: Masses, even: Matrix) -> list[list[float]]:
    """The values of the color scale. A row ends at the diagonal: what follows is the future."""
    values = np.clip(ratios(masses, even), -2 * SPANS[1], 2 * SPANS[1])
    rows: list[list[float]] = np.round(values, 2).tolist()
    return [row[: place + 1] for place, row in enumerate(rows)]


ABOUT_PATHS = (
    "The standard path is softmax(Q·K) and the reciprocal path is softmax(K·Q). Both are causal and use the same "
    "projections. A layer uses one path or a mix of the two. In a layer with a fixed path, the other path is the "
    "result of exchanging W_Q and W_K. One text is one sample, so differences between runs are not evidence alone."
)
ABOUT_LAYERS = (
    "Mean over the heads of a layer and over all positions except the first. Solid: the standard path. Dashed: the "
    "reciprocal path, for the statistics that differ between the paths."
)


def attention_document(runs: Sequence[RunAttention], text: InputText) -> Document:
    """attention.html of one or several runs on one text."""
    names = " | ".join(f"{run.name} at iteration {run.iteration:,}" for run in runs)
    variants = list(dict.fromkeys(run.variant for run in runs))
    blocks: list[Block] = [Paragraph(ABOUT_PATHS)]
    blocks += [Paragraph(one_class(group)) for group in control_groups(variants) if len(group) > 1]
    blocks += [legend(variants)] if len(runs) > 1 else []
    blocks += _sections(runs, text, variants)
    about = f"Attention on {text.tokens:,} tokens: {text.source}"
    return Document(names, blocks, subtitle=about)


def _sections(runs: Sequence[RunAttention], text: InputText, variants: Sequence[str]) -> list[Section]:
    """Statistics by layer, maps and notes."""
    layers = Figure("attention-layers", layer_figure(runs, variants), ABOUT_LAYERS)
    table = Details("means over the early and over the late layers", [_early_late_table(runs, variants)])
    maps: list[Block] = []
    for (layer, head), drawn in maps_by_head(runs).items():
        spec, reach = map_figure(drawn, text)
        caption = f"Layer {layer}, head {head}. The colors reach a factor of {2**reach}."
        maps.append(Figure(f"attention-map{layer}-{head}", spec, caption))
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    return [
        Section("Layer by layer", [layers]),
        Section("Early and late layers", [table]),
        Section("Maps", [Paragraph(ABOUT_MAPS if maps else ""), *maps]),
        Section("Notes on attention", [BulletList(notes)]),
    ]


def _early_late_table(runs: Sequence[RunAttention], variants: Sequence[str]) -> Table:
    """One row for each run, statistic and path."""
    rows = []
    for run in runs:
        label: Text = (*pieces(color_label(run.variant, variants)), f", seed {run.seed}")
        for name, path in statistics_by_path():
            title, by_path = STATISTICS[name]
            statistic = f"{title}, {path}" if by_path else title
            rows.append([label, statistic, *map(_number, early_late_means(run, name, path))])
    return Table(["run", "statistic", "early", "late"], rows, (1,))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
