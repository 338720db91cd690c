"""`make status [STUDY=results/x]`: one line for each run of a study, also while it runs, and the remaining time."""

from __future__ import annotations

from gpt2.system.errors import run_command
from scripts.report import study_directory
from scripts.status.table import status_text


def main() -> int:
    print(status_text(study_directory("status")))
    return 0


if __name__ == "__main__":
    run_command(main)
