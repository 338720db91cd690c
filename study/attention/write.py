"""Inspect the attention of runs on one text; write attention.json of each run and one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from referee.pages.html_page import render_html
from runtime import files
from runtime.seal import write_sealed
from study.attention import inspect
from study.attention.data import InputText, RunAttention, as_json, early_late_means
from study.attention.page import attention_document

PAGE = "attention.html"


def write_attention(
    run_dirs: Sequence[Path], text_file: Path | None, layers: Sequence[int], heads: Sequence[int]
) -> list[str]:
    """Write attention.json of each run, and one page of all runs in the folder of the first.

    layers, heads: of the maps; by default the first and the last layer, and head 0. Returns one message a line.
    """
    models = [inspect.load_run(path) for path in run_dirs]
    depth = min(run.config.model.layers for run in models)
    width = min(run.config.model.heads for run in models)
    layers = inspect.select_indices(layers, depth, "layer", sorted({0, depth - 1}))
    heads = inspect.select_indices(heads, width, "head", [0])
    ids, text = inspect.choose_text(models, text_file)
    inspected = [inspect.inspect_run(run, ids, layers, heads) for run in models]
    for path, run in zip(run_dirs, inspected, strict=True):
        write_sealed(path / "attention.json", as_json(run, text))
    files.write_text(run_dirs[0] / PAGE, render_html(attention_document(inspected, text)))
    return [
        *summary(inspected, text),
        f"wrote {run_dirs[0] / PAGE}, and attention.json in the folder of each run",
    ]


def summary(runs: Sequence[RunAttention], text: InputText) -> list[str]:
    """Return lines for the terminal: the text, then each run and the distance between its two paths."""
    lines = [
        f"text: {text.source}, {text.tokens:,} tokens",
        "total variation between standard and reciprocal attention (0: equal, 1: disjoint):",
    ]
    for run in runs:
        early, late = (
            "-" if value is None else f"{value:.3f}"
            for value in early_late_means(run, "total_variation", "standard")
        )
        lines.append(
            f"{run.name} (variant {run.variant}, seed {run.seed}, iteration {run.iteration:,}): "
            f"{early} in the early layers, {late} in the late layers"
        )
        lines += [f"{run.name}: {note}" for note in run.notes]
    return lines
