"""`make attention RUN=results/STUDY/runs/NAME`: attention statistics and maps of trained runs, as one page.

python -m scripts.attention RUN_DIR [RUN_DIR ...] [--text FILE] [--layers "0 3"] [--heads "0"]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from runtime.errors import UserError, run_command
from runtime.resolved_target import export_environment
from study.make_arguments import command_arguments


def numbers(text: str, name: str) -> list[int]:
    """Whole numbers separated by spaces or commas."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f'{name}="{text}" is not a list of whole numbers; fix: {name}="0 3"') from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.attention")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--layers", default="")
    parser.add_argument("--heads", default="")
    arguments = parser.parse_args(command_arguments(("TEXT", "LAYERS", "HEADS"), paths="RUN"))
    layers, heads = numbers(arguments.layers, "LAYERS"), numbers(arguments.heads, "HEADS")
    if not arguments.runs:
        raise UserError("RUN names no run; fix: make attention RUN=results/STUDY/runs/NAME")
    export_environment()  # before torch is imported
    from study.evaluation.attention_page import write_attention

    print(*write_attention(arguments.runs, arguments.text, layers, heads), sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
