"""`make attention RUN=results/STUDY/runs/NAME`: what the attention of trained runs looks at, as a page of its own.

python -m scripts.attention RUN_DIR [RUN_DIR ...] [--text FILE] [--layers "0 3"] [--heads "0"]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpt2.hardware.resolve import export_environment
from gpt2.system import files
from gpt2.system.errors import UserError, run_command


def numbers(text: str, what: str) -> list[int]:
    """Whole numbers with spaces or commas between them."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f'{what}="{text}" is no list of numbers; right: such as {what}="0 3"') from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.attention")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--layers", default="")
    parser.add_argument("--heads", default="")
    arguments = parser.parse_args()
    layers, heads = numbers(arguments.layers, "LAYERS"), numbers(arguments.heads, "HEADS")
    if not arguments.runs:
        raise UserError("no run was named; right: make attention RUN=results/STUDY/runs/NAME")
    export_environment()
    from pages.page import render_html
    from study.attention import inspect
    from study.attention.data import as_json, halves
    from study.attention.page import attention_document

    runs = [inspect.load(path) for path in arguments.runs]
    deep = min(run.config.model.layers for run in runs)
    wide = min(run.config.model.heads for run in runs)
    layers = inspect.pick(layers, deep, "layer", sorted({0, deep - 1}))
    heads = inspect.pick(heads, wide, "head", [0])
    ids, text = inspect.choose_text(runs, arguments.text)
    seen = [inspect.look(run, ids, layers, heads) for run in runs]
    try:
        for path, one in zip(arguments.runs, seen, strict=True):
            files.write_json(path / "attention.json", as_json(one, text))
        files.write_text(arguments.runs[0] / "attention.html", render_html(attention_document(seen, text)))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
    print(f"{text.tokens:,} tokens: {text.source}")
    for one in seen:
        distance = halves(one, "total_variation", "standard")
        early, late = ("-" if value is None else f"{value:.3f}" for value in distance)
        print(f"{one.run}: total variation between the paths {early} in early layers, {late} in late ones")
    print(f"wrote {arguments.runs[0] / 'attention.html'}, and attention.json in the folder of each run")
    return 0


if __name__ == "__main__":
    run_command(main)
