"""`make evaluate RUN=results/x/runs/B0 PLATFORM="bf16 int4 foreign:1e-3" [MACHINE=w7900]`: a run on other arithmetic.

`make evaluate RUN=models/gpt2` prints perplexity and HellaSwag of a GPT-2 of transformers, with the data of .config.

Results go to RUN/evaluations/. An existing one of the same weights, text, platform and machine is not repeated. On
another machine than that of training the platforms are called bf16@w7900; MACHINE gives that name, by default that of
the device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gpt2.platforms import GRAMMAR, local_platforms, machine_name
from gpt2.transformers_files import is_pretrained
from referee.pages.document import render_terminal
from runtime.detected_hardware import detected_target_name
from runtime.errors import UserError, run_command
from runtime.resolved_target import export_environment
from runtime.settings import load_config
from study.make_arguments import command_arguments


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.evaluate")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--platform", default="")
    parser.add_argument("--machine", default="")
    arguments = parser.parse_args(command_arguments(("PLATFORM", "MACHINE"), paths="RUN"))
    names = arguments.platform.split()
    if len(arguments.runs) != 1:
        raise UserError(
            'RUN names no run; fix: make evaluate RUN=results/STUDY/runs/NAME PLATFORM="bf16 int4"'
        )
    if not arguments.runs[0].is_dir():
        raise UserError(
            f"RUN={arguments.runs[0]} is not a folder; fix: make evaluate RUN=results/STUDY/runs/NAME"
        )
    if is_pretrained(arguments.runs[0]):
        pretrained(arguments.runs[0], names)
        return
    if not names:
        raise UserError(f"PLATFORM names no platform; fix: PLATFORM= one or several of {GRAMMAR}")
    local_platforms(names, "PLATFORM")
    if arguments.machine:
        machine_name(arguments.machine)
    export_environment()  # before torch is imported
    from study.evaluation.transfer_runs import evaluate_run
    from study.report.transfer_page import platforms_document

    found = evaluate_run(arguments.runs[0], names, arguments.machine)
    print(render_terminal(platforms_document(arguments.runs[0].name, found.home, found.results, found.notes)))
    print(f"\nresults: {arguments.runs[0] / 'evaluations'}")


def pretrained(folder: Path, names: Sequence[str]) -> None:
    """Evaluate a model of transformers. UserError where platforms are given."""
    if names:
        raise UserError(
            f"RUN={folder} is a model of transformers, which is evaluated in float32 alone; fix: leave out PLATFORM"
        )
    config = load_config(".config")
    export_environment(config.target.name, detected_target_name(), config.target.deterministic)
    from gpt2.transformers_files import evaluate_pretrained

    print("\n".join(evaluate_pretrained(folder, config)))


if __name__ == "__main__":
    run_command(main)
