"""`make report [STUDY=results/x]`: rebuild a study's report from its records and print the table.

python -m scripts.report [STUDY_DIR]    without STUDY_DIR: the study of .config
"""

from __future__ import annotations

from pathlib import Path

from gpt2.config.dotconfig import read_symbols
from gpt2.system.errors import UserError, run_command
from kconfig.arguments import command_arguments, refuse_assignments
from study.records.lengths import shown_length
from study.report import write
from study.report.write import render_terminal
from study.runner.settings import StudySettings


def study_directory(target: str) -> Path:
    """The folder that STUDY names, or that of .config's study. target: for the message of the error."""
    refuse_assignments()
    if arguments := command_arguments(path="STUDY"):
        directory = Path(arguments[-1])
    elif Path(".config").exists():
        settings = StudySettings.from_symbols(read_symbols(".config"))
        directory = settings.results_dir / settings.name
    else:
        raise UserError(f"there is no .config, which names the study; fix: make {target} STUDY=results/NAME")
    if not (directory / "runs").is_dir():
        raise UserError(
            f"{directory} is not a study folder: it has no folder runs; fix: make {target} STUDY=results/NAME"
        )
    return directory


def main() -> int:
    directory = study_directory("report")
    print(render_terminal(write.write_report(directory)))
    note = shown_length(directory).note
    if note:
        print(note)
    print(f"report: {directory / 'report.html'} (and .md)    numbers: {directory / 'report.json'}")
    return 0


if __name__ == "__main__":
    run_command(main)
