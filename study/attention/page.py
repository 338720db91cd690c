"""Attention of trained runs: statistics by layer, then maps of the chosen heads for both paths.

Builds attention.html and a section of the study's report. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ra.names import is_control_arm, one_class
from referee.pages.document import (
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
from referee.pages.markup import Code, Text, pieces
from study.arm_colors import color_label, legend
from study.attention.data import (
    PATHS,
    STATISTICS,
    InputText,
    RunAttention,
    early_late_means,
    layer_means,
    statistic_key,
    statistics_by_path,
    used_path,
)
from study.attention.figures import ABOUT_MAPS, ABOUT_MASS, SCALES, layer_figure, map_figure, maps_by_head

ABOUT_PATHS = (
    "The standard path is softmax(Q·K) and the reciprocal path is softmax(K·Q). Both are causal and use the same "
    "projections. A layer uses one path or a mix of the two. In a layer with a fixed path, the other path is the "
    "result of exchanging W_Q and W_K. One text is one sample, so differences between runs are not evidence alone."
)
ABOUT_HEAD = "Means over all positions except the first. attention.json has every cell of the map."
ABOUT_LAYERS = (
    "Mean over the heads of a layer and over all positions except the first. Solid: the standard path. Dashed: the "
    "reciprocal path, for the statistics that differ between the paths."
)


def attention_document(runs: Sequence[RunAttention], text: InputText) -> Document:
    """attention.html of one or several runs on one text."""
    names = " | ".join(f"{run.name} at iteration {run.iteration:,}" for run in runs)
    variants = list(dict.fromkeys(run.variant for run in runs))
    controls = [variant for variant in variants if is_control_arm(variant)]
    blocks: list[Block] = [Paragraph(ABOUT_PATHS)]
    blocks += [Paragraph(one_class(controls))] if len(controls) > 1 else []
    blocks += [legend(variants)] if len(runs) > 1 else []
    blocks += [*_sections(runs, text, variants, 2, SCALES), *map(_layer_details, runs)]
    about = f"Attention on {text.tokens:,} tokens: {text.source}"
    return Document(names, blocks, subtitle=about)


def report_section(runs: Sequence[RunAttention], text: InputText, variants: Sequence[str]) -> Section:
    """The section of a study's report: each variant's run of the lowest seed."""
    seeds = " and ".join(str(seed) for seed in sorted({run.seed for run in runs}))
    about = f"{ABOUT_PATHS} Each variant's run of seed {seeds}, on {text.tokens:,} tokens: {text.source}."
    command = Code("make attention RUN=results/STUDY/runs/NAME")
    more = Note(("For other runs, layers, heads and texts: ", command, "."))
    blocks: list[Block] = [Paragraph(about), *_sections(runs, text, variants, 3, SCALES[:1]), more]
    return Section("Where attention goes", blocks if runs else [])


def _sections(
    runs: Sequence[RunAttention], text: InputText, variants: Sequence[str], level: int, scales: Sequence[str]
) -> list[Section]:
    """Statistics by layer, maps and notes. level: of the headings. scales: the color scales of the maps."""
    layers = Figure("attention-layers", layer_figure(runs, variants), ABOUT_LAYERS)
    table = Details("means over the early and over the late layers", [_early_late_table(runs, variants)])
    maps: list[Block] = []
    for (layer, head), drawn in maps_by_head(runs).items():
        spec, reach = map_figure(drawn, text, scales)
        caption = f"Layer {layer}, head {head}. The colors reach a factor of {2**reach}."
        numbers: list[Block] = [_head_table([run for run, _ in drawn], layer, head), Note(ABOUT_HEAD)]
        maps.append(Figure(f"attention-map{layer}-{head}", spec, caption, numbers))
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    about = ABOUT_MAPS if len(scales) == 1 else f"{ABOUT_MAPS} {ABOUT_MASS}"
    return [
        Section("Layer by layer", [layers], level),
        Section("Early and late layers", [table], level),
        Section("Maps", [Paragraph(about if maps else ""), *maps], level),
        Section("Notes on attention", [BulletList(notes)], level),
    ]


def _head_table(runs: Sequence[RunAttention], number: int, head: int) -> Table:
    """The statistics of one head: a row for each run and path."""
    rows = []
    for run in runs:
        layer = next(one for one in run.layers if one.layer == number)
        for path in PATHS:
            values = [getattr(layer, statistic_key(name, path))[head] for name in STATISTICS]
            rows.append([f"{run.name}, {path}", *map(_number, values)])
    return Table(["run and path", *(title for title, _ in STATISTICS.values())], rows)


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


def _layer_details(run: RunAttention) -> Details:
    """All statistics of one run, one row for each layer."""
    headings, columns = ["layer", "uses"], []
    for name, path in statistics_by_path():
        title, by_path = STATISTICS[name]
        headings.append(title.partition(" (")[0] + (f", {path}" if by_path else ""))
        columns.append(layer_means(run, name, path))
    rows = [
        [str(one.layer), used_path(one.reciprocal_share), *(_number(column[one.layer]) for column in columns)]
        for one in run.layers
    ]
    return Details(f"{run.name} in numbers", [Table(headings, rows)])
