"""`make report [STUDY=results/x] [FORMAT=latex]`: rebuild a study's report from its records and print the table.

python -m scripts.report [--format=latex] [STUDY_DIR]    without STUDY_DIR: the study of .config
FORMAT=latex also writes the main table for a paper.
"""

from __future__ import annotations

from pathlib import Path

from runtime.dotconfig import read_symbols
from runtime.errors import UserError, run_command
from study.make_arguments import command_arguments, refuse_assignments
from study.report import report_page as write
from study.report.report_page import render_terminal, write_latex
from study.study_settings import StudySettings
from study.tuned_rates import FOLDER

FORMAT_OPTION = "--format="
LATEX = "latex"


def wants_latex() -> bool:
    """Whether FORMAT asks for LaTeX. UserError for another format."""
    options = [one for one in command_arguments(("FORMAT",)) if one.startswith(FORMAT_OPTION)]
    for name in (option.removeprefix(FORMAT_OPTION) for option in options):
        if name != LATEX:
            raise UserError(
                f"FORMAT is {name}; a report has the format {LATEX}; fix: make report FORMAT={LATEX}"
            )
    return bool(options)


def named_study(target: str) -> Path:
    """The folder that STUDY names, or that of .config's study; of its rates while they are tuned."""
    if arguments := [one for one in command_arguments(path="STUDY") if not one.startswith(FORMAT_OPTION)]:
        return Path(arguments[-1])
    if Path(".config").exists():
        settings = StudySettings.from_symbols(read_symbols(".config"))
        tunes = settings.rates and not (settings.directory / "runs").exists()
        return settings.directory / FOLDER if tunes else settings.directory
    raise UserError(f"there is no .config, which names the study; fix: make {target} STUDY=results/NAME")


def study_directory(target: str) -> Path:
    """The folder that STUDY names, or that of .config's study. target: for the message of the error."""
    refuse_assignments()
    directory = named_study(target)
    if not (directory / "runs").is_dir():
        raise UserError(
            f"{directory} is not a study folder: it has no folder runs; fix: make {target} STUDY=results/NAME"
        )
    return directory


def main() -> int:
    latex = wants_latex()
    directory = study_directory("report")
    report = write.write_report(directory)
    print(render_terminal(report))
    print(f"report: {directory / 'report.html'} (and .md)    numbers: {directory / 'report.json'}")
    if latex:
        print(f"LaTeX: {write_latex(report, directory)}")
    return 0


if __name__ == "__main__":
    run_command(main)
