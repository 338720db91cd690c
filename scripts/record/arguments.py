"""The arguments of the commands that replay steps of one run: RUN, and some of AGAINST, STEP, OUT and others."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path

from runtime.errors import UserError
from study.make_arguments import command_arguments


def run_arguments(
    program: str,
    usage: str,
    variables: Mapping[str, str],
    needed: Collection[str] = (),
    choices: Mapping[str, Collection[str]] | None = None,
    hidden: Mapping[str, int] | None = None,
    unless: str = "",
) -> argparse.Namespace:
    """Parse RUN and other variables of make. UserError names a wrong one.

    variables: name -> default. needed: those besides RUN without which there is nothing to do, unless the variable
    `unless` is given. choices: name -> allowed values.
    hidden: option of child processes -> number of its words. Folders become paths and STEP a number; each is None
    where it is not given.
    """
    parser = argparse.ArgumentParser(prog=f"scripts.{program}")
    for name, default in {"RUN": "", **variables}.items():
        parser.add_argument(f"--{name.lower()}", default=default)
    for name, words in (hidden or {}).items():
        parser.add_argument(f"--{name}", nargs=words, help=argparse.SUPPRESS)
    found = parser.parse_args(command_arguments(("RUN", *variables)))
    values = vars(found)
    for name in () if values.get(unless.lower()) else ("RUN", *needed):
        if not values[name.lower()]:
            raise UserError(f"{name} is missing; fix: {usage}")
    step = values.get("step", "")
    if step and not (step.isascii() and step.isdigit()):
        raise UserError(f"STEP={step} is not a step number; fix: {usage}")
    for name, allowed in (choices or {}).items():
        if (value := values[name.lower()]) not in ("", *allowed):
            raise UserError(f"{name}={value} is unknown; fix: use {', '.join(allowed)}")
    found.step = int(step) if step else None
    for name in {"run", "against", "record", "other", "out"} & values.keys():
        values[name] = Path(values[name]) if values[name] else None
    if found.run and values.get("out") and found.out.resolve().is_relative_to(found.run.resolve()):
        raise UserError(
            f"OUT={found.out} is in the run's folder, which stays as it is; fix: OUT=another folder"
        )
    return found


def result_folder(run_dir: Path, name: str) -> Path:
    """Return results/STUDY/<name>/RUN, or <name>/RUN for a run outside a study."""
    study = run_dir.parent.parent if run_dir.resolve().parent.name == "runs" else Path()
    return study / name / run_dir.resolve().name
