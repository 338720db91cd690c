"""Attention of trained runs on one text: statistics of every layer, maps of chosen heads for both paths.

Writes attention.json of each run, and attention.html of all. Nothing is trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt2 import dataset, tokenizer
from ra.arms import control_groups, one_class
from ra.attention_maps import PIXELS, LayerMaps, layer_maps, pixel_tokens, queries_and_keys
from referee.numerics.text_files import text_parts
from referee.pages.document import Block, BulletList, Document, Figure, Paragraph, Section, Table
from referee.pages.figures import Plain, axis, figure, line
from referee.pages.html_page import render_html
from referee.pages.markup import Text, escape_html, pieces
from runtime import files, records, run_record
from runtime.errors import UserError
from runtime.settings import Config
from study.arm_colors import color, color_label, legend
from study.evaluation.loaded_runs import TrainedRun, load_run

STATISTICS = {  # name -> (short title, title, whether the value differs between the paths)
    "total_variation": ("total variation", "total variation between the paths", False),
    "jensen_shannon": ("Jensen-Shannon", "Jensen-Shannon divergence between the paths (bits)", False),
    "entropy": ("entropy", "entropy (bits)", True),
    "distance": ("distance", "mean attention distance (tokens)", True),
    "previous": ("previous token", "mass on the previous token", True),
    "first": ("first token", "mass on the first token", True),
}
PATHS = ("standard", "reciprocal")
FILE, PAGE = "attention.json", "attention.html"
# The text if the data of the run are not on this machine.
SENTENCE = (
    "When the last train had left the station, the old clock above the platform struck ten, and the woman who had sold "
    "tickets there for thirty years locked the door of her office, put the key into the pocket of her coat, and walked "
    "home along the river, as she had done every night since the day when the station was opened."
)
READABLE = 48  # maximum tokens for a map with a label for each token


@dataclass(frozen=True)
class InputText:
    """The inspected text. pieces: the tokens as strings, for a short text only."""

    source: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def block(self) -> int:
        """Tokens for each cell of a map."""
        return pixel_tokens(self.tokens, PIXELS)


@dataclass(frozen=True)
class RunAttention:
    """Attention of one run. layers: those with query and key."""

    run: TrainedRun
    layers: dict[int, LayerMaps]


def statistic(maps: LayerMaps, name: str, path: str) -> Tensor:
    """Return a value for each head. path: of a statistic that differs between the paths."""
    found: Tensor = getattr(getattr(maps, path) if STATISTICS[name][2] else maps, name)
    return found


def statistics_by_path() -> list[tuple[str, str]]:
    """Return every (name, path) with a value; a statistic common to both paths has PATHS[0]."""
    return [
        (name, path)
        for name, (_, _, by_path) in STATISTICS.items()
        for path in (PATHS if by_path else PATHS[:1])
    ]


def layer_means(one: RunAttention, name: str, path: str) -> dict[int, float]:
    """Return layer -> mean over the heads."""
    return {layer: float(statistic(maps, name, path).mean()) for layer, maps in one.layers.items()}


def early_late_means(one: RunAttention, name: str, path: str) -> tuple[float | None, float | None]:
    """Return the means over layers 0 .. L/2-1 and L/2 .. L-1; None if no such layer was measured."""
    means, middle = layer_means(one, name, path), len(one.run.shares) // 2
    parts = ([m for n, m in means.items() if n < middle], [m for n, m in means.items() if n >= middle])
    early, late = (sum(part) / len(part) if part else None for part in parts)
    return early, late


def used_path(share: float | None) -> str:
    """Name the path that a layer uses."""
    if share is None:
        return "custom attention"
    return {0.0: "standard", 1.0: "reciprocal"}.get(share, f"{100 * share:.1f} % reciprocal")


# ---- measuring


def write_attention(
    run_dirs: Sequence[Path], text_file: Path | None, layers: Sequence[int], heads: Sequence[int]
) -> list[str]:
    """Write attention.json of each run, and one page of all runs in the folder of the first.

    layers, heads: of the maps; by default the first and the last layer, and head 0. Returns one message a line.
    """
    runs = [load_run(path) for path in run_dirs]
    depth = min(run.config.model.layers for run in runs)
    layers = select_indices(layers, depth, "layer", sorted({0, depth - 1}))
    heads = select_indices(heads, min(run.config.model.heads for run in runs), "head", [0])
    text = choose_text(runs, text_file)
    inspected = [inspect_run(run, text, layers, heads) for run in runs]
    for path, one in zip(run_dirs, inspected, strict=True):
        write(path, one, text)
    files.write_text(run_dirs[0] / PAGE, render_html(attention_document(inspected, text)))
    return [
        *summary(inspected, text),
        f"wrote {run_dirs[0] / PAGE}, and attention.json in the folder of each run",
    ]


def select_indices(asked: Sequence[int], count: int, kind: str, default: Sequence[int]) -> list[int]:
    """Return the chosen layers or heads, sorted and unique, or the default. UserError above count - 1."""
    for number in asked:
        if not 0 <= number < count:
            raise UserError(f"{kind} {number} does not exist; fix: {kind.upper()}S=0 .. {count - 1}")
    return sorted(set(asked)) or list(default)


def choose_text(runs: Sequence[TrainedRun], file: Path | None) -> InputText:
    """Return the start of `file`, else of the first validation window, else of a built-in sentence.

    The length is at most the smallest block size of the runs. UserError for an unreadable or short
    file, or runs with several tokenizers.
    """
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
    ids = ids[: min(run.config.model.block_size for run in runs)]
    labels = [tokenizer.decode(encoding, [token]) for token in ids if len(ids) <= READABLE]
    return InputText(source, tuple(ids), tuple(labels))


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


def inspect_run(
    run: TrainedRun, text: InputText, layers: Sequence[int], heads: Sequence[int]
) -> RunAttention:
    """Measure every layer, and compute maps of the chosen layers and heads."""
    found = queries_and_keys(run.model, torch.tensor(text.ids))
    return RunAttention(
        run,
        {
            layer: layer_maps(query_HTD, key_HTD, heads if layer in layers else ())
            for layer, (query_HTD, key_HTD) in found.items()
        },
    )


def write(folder: Path, one: RunAttention, text: InputText) -> None:
    """Write attention.json of a run: a value of each head, and the rows of its maps up to the diagonal."""
    run = one.run
    rows: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    for layer, maps in one.layers.items():
        rows.append({"layer": layer, "reciprocal_share": run.shares[layer]})
        for name, path in statistics_by_path():
            key = f"{name}_{path}" if STATISTICS[name][2] else name
            rows[-1][key] = statistic(maps, name, path).tolist()
        for head, pair in maps.pictures.items():
            masses = dict(zip(PATHS, map(_lower_rows, pair), strict=True))
            drawn.append({"layer": layer, "head": head} | masses)
    value = {
        "schema": 1,
        "text": {"source": text.source, "tokens": text.tokens, "pieces": text.pieces},
        "run": run.name,
        "variant": run.variant,
        "seed": run.seed,
        "iteration": run.iteration,
        "block": text.block,
        "layers": rows,
        "pictures": drawn,
        "notes": run.notes,
    }
    owner = run_record.owner(run_record.load(folder))
    records.write(folder / FILE, value, owner, indent=None)  # on one line: it is large


def _lower_rows(masses: Tensor) -> list[list[float]]:
    rows: list[list[float]] = masses.tolist()
    return [[float(f"{value:.4g}") for value in row[: at + 1]] for at, row in enumerate(rows)]


def summary(runs: Sequence[RunAttention], text: InputText) -> list[str]:
    """Return lines for the terminal: the text, then each run and the distance between its two paths."""
    lines = [
        f"text: {text.source}, {text.tokens:,} tokens",
        "total variation between standard and reciprocal attention (0: equal, 1: disjoint):",
    ]
    for one in runs:
        run, parts = one.run, early_late_means(one, "total_variation", PATHS[0])
        early, late = ("-" if value is None else f"{value:.3f}" for value in parts)
        lines.append(
            f"{run.name} (variant {run.variant}, seed {run.seed}, iteration {run.iteration:,}): "
            f"{early} in the early layers, {late} in the late layers"
        )
        lines += [f"{run.name}: {note}" for note in run.notes]
    return lines


# ---- the page


Matrix = NDArray[np.float64]
SIDE = 330  # pixels on the screen
SPANS = (1, 6)  # limits of the color scale against an even spread, in powers of two
DIVERGING = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f4f4f2"], [0.75, "#f4a582"], [1, "#b2182b"]]
ABOUT_PATHS = (
    "The standard path is softmax(Q·K) and the reciprocal path is softmax(K·Q). Both are causal and use the same "
    "projections. A layer uses one path or a mix of the two. In a layer with a fixed path, the other path is the "
    "result of exchanging W_Q and W_K. One text is one sample, so differences between runs are not evidence alone."
)
ABOUT_LAYERS = (
    "Mean over the heads of a layer and over all positions except the first. Solid: the standard path. Dashed: the "
    "reciprocal path, for the statistics that differ between the paths."
)
ABOUT_MAPS = (
    "A row is a query position. A column is a key position at or before it. Blue is less mass and red is more mass "
    "than uniform attention gives. In long texts one cell is a block of tokens."
)


def attention_document(runs: Sequence[RunAttention], text: InputText) -> Document:
    """attention.html of one or several runs on one text."""
    names = " | ".join(f"{one.run.name} at iteration {one.run.iteration:,}" for one in runs)
    variants = list(dict.fromkeys(one.run.variant for one in runs))
    maps: list[Block] = []
    drawn = {(layer, head) for one in runs for layer, found in one.layers.items() for head in found.pictures}
    for layer, head in sorted(drawn):
        having = [one for one in runs if layer in one.layers and head in one.layers[layer].pictures]
        spec, reach = map_figure(having, layer, head, text)
        caption = f"Layer {layer}, head {head}. The colors reach a factor of {2**reach}."
        maps.append(Figure(f"attention-map{layer}-{head}", spec, caption))
    blocks: list[Block] = [
        Paragraph(ABOUT_PATHS),
        *(Paragraph(one_class(group)) for group in control_groups(variants) if len(group) > 1),
        *([legend(variants)] if len(runs) > 1 else []),
        Section("Layer by layer", [Figure("attention-layers", layer_figure(runs, variants), ABOUT_LAYERS)]),
        Section("Early and late layers", [_early_late_table(runs, variants)]),
        Section("Maps", [Paragraph(ABOUT_MAPS if maps else ""), *maps]),
        Section(
            "Notes on attention",
            [BulletList([f"{r.run.name}: {note}" for r in runs for note in r.run.notes])],
        ),
    ]
    return Document(names, blocks, subtitle=f"Attention on {text.tokens:,} tokens: {text.source}")


def layer_figure(runs: Sequence[RunAttention], variants: Sequence[str]) -> Plain:
    """One line for each run and path against the layer. The reader chooses the statistic."""
    lines = [(one, path) for one in runs for path in PATHS]
    data = [
        line(
            f"{one.run.name}, {path}",
            color(one.run.variant, variants),
            one.run.variant,
            label=one.run.variant if path == PATHS[0] else "",
            dash="solid" if path == PATHS[0] else "dash",
            marker={"size": 6},
            x=list(one.layers),
            y=[],
        )
        for one, path in lines
    ]
    options = []
    for name, (short, title, by_path) in STATISTICS.items():
        shown = [layer_means(one, name, path) if by_path or path == PATHS[0] else {} for one, path in lines]
        values = [{"y": [float(f"{value:.4g}") for value in means.values()]} for means in shown]
        options.append({"name": short, "data": values, "layout": {"yaxis": axis(title)}})
    narrow = {"margin": {"l": 62, "r": 74}, "height": 320}
    choices = [{"label": "Statistic", "options": options}]
    across, upwards = axis("layer", dtick=1), {"rangemode": "tozero"}
    return figure(data, 380, (66, 84, 12, 48), narrow, choices, xaxis=across, yaxis=upwards)


def map_figure(runs: Sequence[RunAttention], layer: int, head: int, text: InputText) -> tuple[Plain, int]:
    """The two paths of one run at a time as heat maps of one head, and the powers of two that the colors reach.

    A switch chooses the run. The color scale is that of all runs.
    """
    even = even_spread(text.tokens, text.block)
    maps = [[ratios(masses.numpy(), even) for masses in one.layers[layer].pictures[head]] for one in runs]
    distances = [abs(ratio[np.tril_indices(len(even))]) for pair in maps for ratio in pair]
    reach = min(max(math.ceil(np.quantile(distances, 0.99, method="lower")), SPANS[0]), SPANS[1])
    colors = {"zmin": -reach, "zmax": reach, "colorscale": DIVERGING}
    data = [_heat(column, len(even), text) | colors for column in range(2)]
    options = []
    for one, pair in zip(runs, maps, strict=True):
        name, share = one.run.name, one.run.shares[layer]
        uses = used_path(share)
        options.append({
            "name": f"{name} ({uses})" if "%" in uses else name,
            "data": [{"z": _cells(ratio)} for ratio in pair],
            "layout": {"annotations": [_title(name, column, share) for column in range(2)]},
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


def _heat(column: int, cells: int, text: InputText) -> Plain:
    """Positions and hover texts of a map."""
    at, number = [place * text.block for place in range(cells)], "2" if column else ""
    heat: Plain = {"type": "heatmap", "x": at, "y": at, "xaxis": f"x{number}", "yaxis": f"y{number}"}
    heat |= {"showscale": False, "hoverongaps": False}
    heat["hovertemplate"] = "query %{y}, key %{x}: %{z}<extra></extra>"
    if len(text.pieces) == cells:
        labels = [escape_html(piece) or "·" for piece in text.pieces]
        heat["text"] = [[f"{query} → {key}" for key in labels] for query in labels]
        heat["hovertemplate"] = "%{text}: %{z}<extra></extra>"
    return heat


def even_spread(tokens: int, block: int) -> Matrix:
    """The map (N, N) of uniform causal attention, `block` tokens a cell."""
    rows = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    starts = np.arange(0, tokens, block)
    sums: Matrix = np.add.reduceat(np.add.reduceat(rows, starts, axis=1), starts, axis=0)
    return sums / np.diff(np.append(starts, tokens))[:, None]


def ratios(masses: Matrix, even: Matrix) -> Matrix:
    """log2 of the mass over that of an even spread; 0 above the diagonal."""
    ratio: Matrix = np.log2(np.maximum(masses, 1e-30) / np.maximum(even, 1e-30))
    return ratio


def _cells(ratio: Matrix) -> list[list[float]]:
    """The values of the color scale. A row ends at the diagonal: what follows is the future."""
    rows: list[list[float]] = np.round(np.clip(ratio, -2 * SPANS[1], 2 * SPANS[1]), 2).tolist()
    return [row[: place + 1] for place, row in enumerate(rows)]


def _early_late_table(runs: Sequence[RunAttention], variants: Sequence[str]) -> Table:
    """One row for each run, statistic and path."""
    rows: list[list[Text]] = []
    for one in runs:
        label: Text = (*pieces(color_label(one.run.variant, variants)), f", seed {one.run.seed}")
        for name, path in statistics_by_path():
            _, title, by_path = STATISTICS[name]
            means = ("-" if value is None else f"{value:.3g}" for value in early_late_means(one, name, path))
            rows.append([label, f"{title}, {path}" if by_path else title, *means])
    return Table(["run", "statistic", "early", "late"], rows, (1,))
