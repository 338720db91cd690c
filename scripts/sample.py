"""`make sample RUN="results/x/runs/B0 results/x/runs/RAALL0" [PROMPT="The "]`: texts that trained runs write.

python -m scripts.sample RUN_DIR [RUN_DIR ...] [--prompt TEXT] [--tokens N] [--count N] [--temperature X] [--top-k N]
[--top-p X] [--seed N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from referee.pages.document import render_terminal
from referee.pages.html_page import render_html
from runtime import files
from runtime.errors import UserError, run_command
from runtime.resolved_target import export_environment
from study.evaluation.samples import SamplingSettings, as_json, samples_document
from study.make_arguments import command_arguments

OPTIONS = ("PROMPT", "TOKENS", "COUNT", "TEMPERATURE", "TOP_K", "TOP_P", "SEED", "OUT")
MOST_TEXTS = 1000
SMALLEST_TEMPERATURE = 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.sample")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--prompt", default="")
    for name in OPTIONS[1:-1]:
        parser.add_argument(f"--{name.lower()}", f"--{name.lower().replace('_', '-')}", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(command_arguments(OPTIONS, paths="RUN"))
    if not given.runs:
        raise UserError("RUN names no run; fix: make sample RUN=results/STUDY/runs/NAME")
    settings = SamplingSettings(
        given.prompt,
        int(number("TOKENS", given.tokens, 0, 1, math.inf, whole=True)),
        int(number("COUNT", given.count, 3, 1, MOST_TEXTS, whole=True)),
        int(number("SEED", given.seed, 0, 0, 2**62, whole=True)),
        number("TEMPERATURE", given.temperature, 1.0, 0.0, 100.0),
        int(number("TOP_K", given.top_k, 0, 0, math.inf, whole=True)),
        number("TOP_P", given.top_p, 1.0, 1e-6, 1.0),
    )
    if 0 < settings.temperature < SMALLEST_TEMPERATURE:
        raise UserError(
            f"TEMPERATURE={given.temperature} is too small to divide the logits by; fix: TEMPERATURE=0, which takes "
            f"the most probable token, or at least {SMALLEST_TEMPERATURE:g}"
        )
    export_environment()  # before torch is imported
    from study.evaluation.samples import sample_runs

    runs = sample_runs(given.runs, settings)
    document = samples_document(runs, settings)
    print(render_terminal(document))
    folder = given.out or given.runs[0].parent.parent / "samples"
    name = "-".join(run.run for run in runs)[:100]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / f"{name}.json", as_json(runs, settings))
        files.write_text(folder / f"{name}.html", render_html(document))
    except OSError as error:
        raise UserError(
            f"{error.filename} cannot be written: {error.strerror}; fix: OUT=another folder"
        ) from error
    print(f"wrote {folder / f'{name}.html'} and .json")
    return 0


def number(name: str, text: str, default: float, least: float, most: float, *, whole: bool = False) -> float:
    """Return the number of a make variable. UserError for other text and out of range."""
    if not text:
        return default
    try:
        value = float(int(text) if whole else float(text))
    except ValueError:
        raise UserError(
            f"{name}={text} is not a {'whole ' if whole else ''}number; fix: {name}={default:g}"
        ) from None
    if not least <= value <= most:
        limit = f" to {most:g}" if most < math.inf else ""
        raise UserError(f"{name}={text} is out of range; fix: {name}= from {least:g}{limit}")
    return value


if __name__ == "__main__":
    run_command(main)
