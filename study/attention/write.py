"""Inspect the attention of runs on one text; write attention.json of each run and one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2.system import files
from gpt2.system.errors import UserError
from pages.page import render_html
from study.attention import inspect
from study.attention.data import Look, Text, as_json, halves
from study.attention.page import attention_document

PAGE = "attention.html"


def write_attention(
    run_dirs: Sequence[Path], text_file: Path | None, layers: Sequence[int], heads: Sequence[int]
) -> list[str]:
    """Write attention.json of each run, and the page of all runs in the folder of the first one.

    layers, heads: of the maps; empty: the first and the last layer, and head 0. Returns messages, a line each.
    """
    runs = [inspect.load(path) for path in run_dirs]
    depth = min(run.config.model.layers for run in runs)
    width = min(run.config.model.heads for run in runs)
    layers = inspect.pick(layers, depth, "layer", sorted({0, depth - 1}))
    heads = inspect.pick(heads, width, "head", [0])
    ids, text = inspect.choose_text(runs, text_file)
    looks = [inspect.look(run, ids, layers, heads) for run in runs]
    try:
        for path, look in zip(run_dirs, looks, strict=True):
            files.write_json(path / "attention.json", as_json(look, text))
        files.write_text(run_dirs[0] / PAGE, render_html(attention_document(looks, text)))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
    return [
        *summary(looks, text),
        f"wrote {run_dirs[0] / PAGE}, and attention.json in the folder of each run",
    ]


def summary(looks: Sequence[Look], text: Text) -> list[str]:
    """The text, and for each run its name explained and the distance between its two paths."""
    lines = [
        f"text: {text.source}, {text.tokens:,} tokens",
        "total variation between the standard and the reciprocal attention (0: equal, 1: disjoint):",
    ]
    for look in looks:
        early, late = (
            "-" if value is None else f"{value:.3f}" for value in halves(look, "total_variation", "standard")
        )
        lines.append(
            f"{look.run} (variant {look.variant}, seed {look.seed}, iteration {look.iteration:,}): "
            f"{early} in the early layers, {late} in the late layers"
        )
        lines += [f"{look.run}: {note}" for note in look.notes]
    return lines
