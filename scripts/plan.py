"""`make plan [SPREAD=0.5]`: the runs, hours, disk space and memory of .config's study, and what it will detect.

Nothing is trained or timed. SPREAD: noise of one run in percent of perplexity, where no finished study shows it.
"""

from __future__ import annotations

import argparse
import math

from referee.pages.document import render_terminal
from runtime.dotconfig import NUMBER, read_text
from runtime.errors import UserError, run_command
from scripts.study import CONFIG, first_line, load
from study.make_arguments import command_arguments


def spread(text: str) -> float | None:
    """Parse SPREAD; None where it is not given."""
    if not text:
        return None
    value = float(text) if NUMBER.fullmatch(text) else math.nan
    if not 0 < value < 100:
        raise UserError(f"SPREAD={text} is not a percentage above 0 and below 100; fix: make plan SPREAD=0.5")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.plan")
    parser.add_argument("--spread", default="")
    given = spread(parser.parse_args(command_arguments(("SPREAD",))).spread)
    symbols, config, settings = load()
    print(first_line(config, settings) + "\n", flush=True)
    if config.grpo:
        runs, steps = len(settings.variants) * settings.seeds, config.budget.max_iterations
        print(
            f"{runs} runs x {steps} steps x {config.batch.effective:,} responses of at most "
            f"{config.grpo.response_tokens} tokens; hours, memory and power are predicted for GPT-2 alone"
        )
        return
    from study.planning.plan_page import forecasts, plan_document
    from study.planning.planned_power import find_past_studies, study_sight

    values = {name: entry.value for name, entry in symbols.entries.items()}
    past = find_past_studies(settings.results_dir, values)
    studies = forecasts(symbols, read_text(CONFIG), past)
    sight = study_sight(settings, past, given, studies[-1].looks)
    print(render_terminal(plan_document(studies, settings, sight)))


if __name__ == "__main__":
    run_command(main)
