"""`make report [STUDY=results/x]`: rebuild a study's report from its records and print the table.

python -m scripts.report [STUDY_DIR]    without STUDY_DIR: the study of .config
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2.config.dotconfig import read_symbols
from gpt2.system.errors import UserError, run_command
from kconfig.arguments import command_arguments, refuse_assignments
from study.records.lengths import shown_length
from study.report import write
from study.report.write import render_terminal
from study.runner.settings import StudySettings
from study.sizes.build import read_sizes, study_folder
from study.sizes.write import write_sizes


def named_study(target: str) -> tuple[Path, tuple[str, ...]]:
    """The folder that STUDY names, or that of .config's study; and its sizes, where it has several."""
    if arguments := command_arguments(path="STUDY"):
        directory = Path(arguments[-1])
        return directory, read_sizes(directory)
    if Path(".config").exists():
        settings = StudySettings.from_symbols(read_symbols(".config"))
        return settings.results_dir / settings.name, settings.sizes
    raise UserError(f"there is no .config, which names the study; fix: make {target} STUDY=results/NAME")


def study_directory(target: str) -> Path:
    """The folder that STUDY names, or that of .config's study. target: for the message of the error."""
    refuse_assignments()
    directory, sizes = named_study(target)
    if sizes:
        raise UserError(
            f"{directory} is a study of the sizes {', '.join(sizes)}; fix: make {target} STUDY={directory}-{sizes[0]}"
        )
    if not (directory / "runs").is_dir():
        raise UserError(
            f"{directory} is not a study folder: it has no folder runs; fix: make {target} STUDY=results/NAME"
        )
    if next((directory / "runs").glob("*/responses"), None):
        raise UserError(
            f"{directory} is a GRPO study; fix: make grpo (it verifies the runs and writes the page)"
        )
    return directory


def report_sizes(directory: Path, sizes: Sequence[str]) -> None:
    """Rebuild the report of each size that has runs, and the page of all sizes."""
    folders = [study_folder(directory, size) for size in sizes]
    started = [folder for folder in folders if (folder / "runs").is_dir()]
    if not started:
        raise UserError(
            f"no study of the sizes {', '.join(sizes)} has runs: {folders[0]} has no folder runs; fix: run `make`"
        )
    for folder in started:
        write.write_report(folder)
    print(write_sizes(directory, sizes))


def main() -> int:
    refuse_assignments()
    directory, sizes = named_study("report")
    if sizes:
        report_sizes(directory, sizes)
        return 0
    directory = study_directory("report")
    print(render_terminal(write.write_report(directory)))
    note = shown_length(directory).note
    if note:
        print(note)
    print(f"report: {directory / 'report.html'} (and .md)    numbers: {directory / 'report.json'}")
    return 0


if __name__ == "__main__":
    run_command(main)
