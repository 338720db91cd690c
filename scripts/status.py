"""`make status [STUDY=results/x]`: one line for each run of a study, also while it runs, and the remaining time."""

from __future__ import annotations

from pathlib import Path

from runtime.dotconfig import read_symbols
from runtime.errors import run_command
from scripts.report import study_directory
from study.make_arguments import command_arguments
from study.runs import read_expected
from study.status_table import status_text
from study.study_settings import StudySettings
from study.tuned_rates import read_choice


def main() -> int:
    directory = study_directory("status")
    print(status_text(directory))
    if not command_arguments(path="STUDY"):
        print(more_configured(directory), end="")
    return 0


def more_configured(directory: Path) -> str:
    """Say what .config asks for and the last `make` did not know; "" where there is nothing."""
    settings, expected = StudySettings.from_symbols(read_symbols(".config")), read_expected(directory)
    if directory != settings.directory:  # of the learning rates, which are tuned first
        return ""
    choice = read_choice(directory)
    names = choice.names if choice else {}
    added = [name for name in settings.variants if names.get(name, name) not in expected.variants]
    if settings.seeds <= expected.seeds and not added:
        return ""
    seeds = f" at {settings.seeds} seeds" if settings.seeds > expected.seeds else ""
    return f".config now asks for {' '.join(settings.variants)}{seeds}; `make` starts the missing runs\n"


if __name__ == "__main__":
    run_command(main)
