"""python -m tests.study.many_runs FOLDER RUNS [PLANNED]: what one more finished run costs the report of a study.

A synthetic run has 67 validations, 3,350 logged steps and 10,042 items of HellaSwag. PLANNED: a multiple of ten.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime import run_record
from study.report.report_page import write_report
from study.runs import RunList
from study.status_table import status_text
from tests.checked_files import write_checked, write_right
from tests.study.sample_records import VARIANTS, a_design, a_plan, a_study

OTHERS = ("NOPE", "RA:0", "RA:1", "RA:0-1", "B+WD=0.2")  # planned arms without a run
STEPS = 3350


def planned_runs(study: Path, runs: int, planned: int) -> RunList:
    if planned == runs:
        return RunList(study, VARIANTS, range(runs // len(VARIANTS)))
    return RunList(study, (*VARIANTS, *OTHERS), range(planned // 10))


def create(study: Path, seeds: int) -> None:
    """Create a finished study of 5 arms at each seed."""
    a_study(study, seeds, ends=dict.fromkeys(VARIANTS, STEPS))
    draw = np.random.default_rng(0)
    for folder in sorted((study / "runs").iterdir()):
        write_right(folder, "hellaswag", (draw.random(10042) < 0.3).tolist())
        run_record.write(folder, run_record.load(folder))
    write_checked(study / "plan.json", a_plan(STEPS, **a_design((seeds,))))


def timed(what: str, work: Callable[[], object]) -> None:
    began, used = time.monotonic(), time.process_time()
    work()
    print(
        f"{what}: {time.monotonic() - began:.2f} s, processor {time.process_time() - used:.2f} s", flush=True
    )


def main(study: Path, runs: int, planned: int) -> None:
    if not study.exists():
        create(study, runs // len(VARIANTS))
    planned_runs(study, runs, planned).write_expected()
    timed("first report of a process", lambda: write_report(study))
    for seed in range(5):
        folder = study / "runs" / f"B{seed}"
        run_record.write(folder, run_record.load(folder))  # as a run that has just finished
        timed("report after one more run", lambda: write_report(study))
    timed("status", lambda: status_text(study))
    timed("runs left", planned_runs(study, runs, planned).pending)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[-1]))
