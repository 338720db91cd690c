"""`make verify [STUDY=results/x]`: check a study's records, side files and checkpoints against their checksums.

python -m scripts.verify [STUDY_DIR]    without STUDY_DIR: the study of .config. Exit status 1 for any damage.
"""

from __future__ import annotations

from runtime.errors import run_command
from scripts.report import study_directory
from study.runs import REMEDY
from study.verify import verify_study


def main() -> int:
    rows = verify_study(study_directory("verify"))
    damaged = [row for row in rows if row.problems]
    print(*(row.text for row in rows), sep="\n")
    print(f"{len(damaged)} of {len(rows)} do not agree; {REMEDY}" if damaged else f"all {len(rows)} agree")
    return 1 if damaged else 0


if __name__ == "__main__":
    run_command(main)
