"""Attention of trained runs: statistics by layer, then maps of the chosen heads for both paths.

Builds attention.html and a section of the study's report. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pages.components import color, color_label, legend
from pages.document import (
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Note,
    Paragraph,
    Section,
    Table,
)
from pages.markup import Code, Text, escape_figure, pieces
from ra.names import is_control_arm, one_class
from study.attention import data as recorded
from study.attention.data import (
    PATHS,
    STATISTICS,
    RunAttention,
    early_late_means,
    layer_means,
    statistics_by_path,
    used_path,
)
from study.attention.figures import ABOUT_MAPS, ABOUT_MASS, heads_with_maps, map_by_variant, maps_of_runs

SHORT = {
    "total_variation": "total variation", "jensen_shannon": "Jensen-Shannon", "entropy": "entropy",
    "distance": "distance", "previous": "previous token", "first": "first token",
}  # fmt: skip
DASHES = {"standard": "solid", "reciprocal": "dash"}
ABOUT_PATHS = (
    "The standard path is softmax(Q·K) and the reciprocal path is softmax(K·Q). Both are causal and use the same "
    "projections. A layer uses one path or a mix of the two. In a layer with a fixed path, the other path is the "
    "result of exchanging W_Q and W_K. One text is one sample, so differences between runs are not evidence alone."
)


def attention_document(runs: Sequence[RunAttention], text: recorded.InputText) -> Document:
    """attention.html of one or several runs on one text."""
    names = " | ".join(f"{run.name} at iteration {run.iteration:,}" for run in runs)
    variants = list(dict.fromkeys(run.variant for run in runs))
    blocks: list[Block] = [Paragraph(ABOUT_PATHS)]
    controls = [variant for variant in variants if is_control_arm(variant)]
    blocks += [Paragraph(one_class(controls))] if len(controls) > 1 else []
    blocks += [legend(variants)] if len(runs) > 1 else []
    layers = Figure(
        "layers",
        layer_figure(runs, variants),
        "Mean over the heads of a layer and over all positions except the first. Solid: the standard path. Dashed: the "
        "reciprocal path, for the statistics that differ between the paths.",
    )
    blocks += [
        Section("Layer by layer", [layers]),
        Section("Early and late layers", [_early_late_table(runs, variants)]),
        _maps_section(runs, text),
        *(_layer_details(run) for run in runs),
        Section("Notes", [BulletList([f"{run.name}: {note}" for run in runs for note in run.notes])]),
    ]
    about = f"Attention on {text.tokens:,} tokens: {text.source}"
    return Document(names, blocks, subtitle=about, page_title=f"Attention of {names}")


def report_section(runs: Sequence[RunAttention], text: recorded.InputText, names: Sequence[str]) -> Section:
    """Statistics by layer and the first and last layer's maps, one variant at a time."""
    seeds = " and ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    about = f"{ABOUT_PATHS} Each variant's run of seed {seeds}, on {text.tokens:,} tokens: {text.source}."
    layers = Figure(
        "attention-layers",
        layer_figure(runs, list(names)),
        "Mean over the heads of a layer. Solid: the standard path. Dashed: the reciprocal path.",
    )
    table = Details("means over the early and over the late layers", [_early_late_table(runs, list(names))])
    maps = [
        Figure(
            f"attention-map{number}", map_by_variant(drawn, layer, head, text), f"Layer {layer}, head {head}."
        )
        for number, ((layer, head), drawn) in enumerate(heads_with_maps(runs).items())
    ]
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    command = Code("make attention RUN=results/STUDY/runs/NAME")
    return Section(
        "Where attention goes",
        [
            Paragraph(about),
            layers,
            Section("Early and late layers", [table], level=3),
            Section("Maps", [Paragraph(ABOUT_MAPS), *maps] if maps else [], level=3),
            BulletList(notes),
            Note(("For other runs, layers, heads and texts: ", command, ".")),
        ]
        if runs
        else [],
    )


def layer_figure(runs: Sequence[RunAttention], variants: list[str]) -> dict[str, Any]:
    """One line for each run and path against the layer. The reader chooses the statistic."""
    data: list[dict[str, Any]] = []
    options: list[dict[str, Any]] = [
        {"name": SHORT[name], "data": [], "layout": {"yaxis": {"title": {"text": title}}}}
        for name, (title, _) in STATISTICS.items()
    ]
    for run in runs:
        variant = escape_figure(run.variant)
        for path in PATHS:
            data.append({
                "type": "scatter", "mode": "lines+markers", "name": f"{escape_figure(run.name)}, {path}",
                "x": list(run.layers), "y": [], "marker": {"size": 6},
                "line": {"color": color(run.variant, variants), "width": 2, "dash": DASHES[path]},
                "meta": {"variant": variant, "label": variant if path == PATHS[0] else ""},
            })  # fmt: skip
            for option, (name, (_, by_path)) in zip(options, STATISTICS.items(), strict=True):
                values = [float(f"{value:.4g}") for value in layer_means(run, name, path).values()]
                option["data"].append({"y": values if by_path or path == PATHS[0] else []})
    return {
        "data": data,
        "layout": {
            "height": 380,
            "margin": {"l": 66, "r": 84, "t": 12, "b": 48},
            "xaxis": {"title": {"text": "layer"}, "dtick": 1},
            "yaxis": {"rangemode": "tozero"},
        },
        "narrow": {"margin": {"l": 62, "r": 74}, "height": 320},
        "choices": [{"label": "Statistic", "options": options}],
        "labelled": True,
    }


def _early_late_table(runs: Sequence[RunAttention], variants: list[str]) -> Table:
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


def _layer_details(run: RunAttention) -> Details:
    """All statistics of one run, one row for each layer."""
    headings, columns = ["layer", "uses"], []
    for name, path in statistics_by_path():
        title, by_path = STATISTICS[name]
        headings.append(title.partition(" (")[0] + (f", {path}" if by_path else ""))
        columns.append(layer_means(run, name, path))
    rows = [
        [str(number), used_path(layer.share), *(_number(column[number]) for column in columns)]
        for number, layer in run.layers.items()
    ]
    return Details(f"{run.name} in numbers", [Table(headings, rows)])


def _maps_section(runs: Sequence[RunAttention], text: recorded.InputText) -> Section:
    """One figure for each chosen layer and head: a row for each run, the standard path left of the reciprocal path."""
    blocks: list[Block] = []
    for (layer, head), drawn in heads_with_maps(runs).items():
        spec, reach = maps_of_runs(drawn, layer, head, text)
        uses = "; ".join(f"{run.name} uses {used_path(run.layers[layer].share)}" for run in drawn)
        caption = f"Layer {layer}, head {head}. {uses}. The colors reach a factor of {2**reach}."
        blocks.append(Figure(f"map{layer}-{head}", spec, caption))
    return Section("Maps", [Paragraph(f"{ABOUT_MAPS} {ABOUT_MASS}"), *blocks] if blocks else [])
