"""`make report [STUDY=results/x] [FORMAT=latex]`: rebuild a study's report from its records and print the table.

python -m scripts.report [--format=latex] [STUDY_DIR]    without STUDY_DIR: the study of .config
FORMAT=latex also writes the main table for a paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from configuration.arguments import command_arguments, refuse_assignments
from gpt2.config.dotconfig import read_symbols
from gpt2.system.errors import UserError, run_command
from study.records.lengths import shown_length
from study.report import write
from study.report.build import Report
from study.report.write import render_terminal, write_latex
from study.runner.settings import StudySettings
from study.sizes.build import read_sizes, study_folder
from study.sizes.write import write_sizes

FORMAT_OPTION = "--format="
FORMATS = ("latex",)


def report_formats() -> list[str]:
    """The formats that FORMAT names, beside the pages."""
    found = [
        one.removeprefix(FORMAT_OPTION)
        for one in command_arguments(("FORMAT",))
        if one.startswith(FORMAT_OPTION)
    ]
    for name in found:
        if name not in FORMATS:
            raise UserError(
                f"FORMAT is {name}; a report has the format {', '.join(FORMATS)}; fix: make report FORMAT={FORMATS[0]}"
            )
    return found


def write_formats(report: Report, directory: Path, formats: Sequence[str]) -> None:
    """Write the other formats and name their files."""
    if "latex" in formats:
        print(f"LaTeX: {write_latex(report, directory)}")


def named_study(target: str) -> tuple[Path, tuple[str, ...]]:
    """The folder that STUDY names, or that of .config's study; and its sizes, where it has several."""
    if arguments := [one for one in command_arguments(path="STUDY") if not one.startswith(FORMAT_OPTION)]:
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


def report_sizes(directory: Path, sizes: Sequence[str], formats: Sequence[str] = ()) -> None:
    """Rebuild the report of each size that has runs, and the page of all sizes."""
    folders = [study_folder(directory, size) for size in sizes]
    started = [folder for folder in folders if (folder / "runs").is_dir()]
    if not started:
        raise UserError(
            f"no study of the sizes {', '.join(sizes)} has runs: {folders[0]} has no folder runs; fix: run `make`"
        )
    for folder in started:
        write_formats(write.write_report(folder), folder, formats)
    print(write_sizes(directory, sizes))


def main() -> int:
    refuse_assignments()
    formats = report_formats()
    directory, sizes = named_study("report")
    if sizes:
        report_sizes(directory, sizes, formats)
        return 0
    directory = study_directory("report")
    report = write.write_report(directory)
    print(render_terminal(report))
    note = shown_length(directory).note
    if note:
        print(note)
    print(f"report: {directory / 'report.html'} (and .md)    numbers: {directory / 'report.json'}")
    write_formats(report, directory, formats)
    return 0


if __name__ == "__main__":
    run_command(main)
