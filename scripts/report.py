"""`make report`: rebuild a study's report from its records and print the table.

python -m scripts.report [STUDY_DIR]    without one: the study that .config names
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpt2.config.config import read_symbols
from gpt2.system.errors import UserError, run_command
from scripts.study import refuse_assignments
from study.report import write
from study.report.markdown import terminal
from study.runner.settings import StudySettings


def main() -> int:
    refuse_assignments()
    if len(sys.argv) > 1:
        directory = Path(sys.argv[1])
    else:
        settings = StudySettings.from_symbols(read_symbols(".config"))
        directory = settings.results_dir / settings.name
    if not directory.is_dir():
        raise UserError(f"{directory} is no study folder; right: results/NAME of a study that was started")
    print(terminal(write.write_report(directory)))
    print(f"report: {directory / 'report.html'} (and .md)    numbers: {directory / 'report.json'}")
    return 0


if __name__ == "__main__":
    run_command(main)
