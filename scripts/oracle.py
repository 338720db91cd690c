"""`make oracle RUN=results/x/runs/B0 STEP=40 [OTHER=oracle.json] [OUT=]`: operations against float64 on the CPU.

The step is recorded first; RECORD is one that `make record` wrote. OTHER: the results of the benchmark machine. The
exit status is 0 for every verdict.
"""

from __future__ import annotations

import functools
from pathlib import Path

from runtime import run_record
from runtime.errors import run_command
from runtime.resolved_target import export_environment
from scripts.record import record_run, result_folder, run_arguments
from study.evaluation.loaded_runs import enter_environment, open_run

USAGE = "make oracle RUN=results/STUDY/runs/NAME STEP=40, or RECORD=the folder of a step"
VARIABLES = {"STEP": "", "RECORD": "", "OTHER": "", "OUT": ""}  # and RUN


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = run_arguments("oracle", USAGE, VARIABLES, ("STEP",), unless="RECORD")
    export_environment()  # before torch is imported
    record = given.record or record_of_run(given.run, given.step, restart)
    from referee.numerics.oracle.command import check_record

    check_record(record, given.out or record.with_name(f"{record.name}-oracle"), other=given.other)
    return 0


def record_of_run(run_dir: Path, step: int, restart: bool) -> Path:
    """Record the values of a step of a run. Returns the folder of the step."""
    record = run_record.load_given(run_dir)
    enter_environment(record, restart)
    out = result_folder(run_dir, "records")
    return record_run(open_run(run_dir, record, step), out, "mix", "tensor")


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
