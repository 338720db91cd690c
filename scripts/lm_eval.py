"""`make lm-eval RUN="results/x/runs/B0 results/x/runs/RALEARN0" TASKS="hellaswag piqa" [TASK_DATA=folder]`.

Evaluate trained runs on tasks of lm-evaluation-harness. Results go to RUN/evaluations/; an existing result of the same
weights, items, task and harness is not repeated. TASK_DATA names a folder with the items, where there is no hub.

python -m scripts.lm_eval RUN_DIR [RUN_DIR ...] --tasks "hellaswag piqa" [--task-data FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from referee.pages.document import render_terminal
from runtime.errors import UserError, run_command
from runtime.resolved_target import export_environment
from study.make_arguments import command_arguments

USUAL = "hellaswag lambada_openai piqa arc_easy winogrande"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.lm_eval")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--tasks", default="")
    parser.add_argument("--task_data", "--task-data", type=Path)
    given = parser.parse_args(command_arguments(("TASKS", "TASK_DATA"), paths="RUN"))
    runs, names = list(dict.fromkeys(given.runs)), given.tasks.split()
    if not runs:
        raise UserError(f'RUN names no run; fix: make lm-eval RUN=results/STUDY/runs/NAME TASKS="{USUAL}"')
    for run in runs:
        if not (run / "run.json").is_file():
            raise UserError(f"RUN={run} is not a run; fix: make lm-eval RUN=results/STUDY/runs/NAME")
    if not names:
        raise UserError(f'TASKS names no task; fix: TASKS="{USUAL}", or some of them')
    export_environment()  # before torch is imported
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError:
        raise UserError(
            "lm_eval is not installed; fix: make lm-eval, or pip install 'lm_eval[hf]==0.4.13'"
        ) from None
    from study.evaluation.lm_eval_page import results_document, results_of
    from study.evaluation.lm_eval_runs import evaluate_run, load_tasks

    tasks = load_tasks(names, given.task_data)
    results = []
    for number, run in enumerate(runs, 1):
        evaluated = evaluate_run(run, tasks)
        existing = [name for name in tasks if name not in evaluated.computed]
        print(f"[{number}/{len(runs)}] {run.name}: evaluated on {', '.join(evaluated.computed) or 'nothing new'}"
              + (f"; existing results of {', '.join(existing)}" if existing else ""), flush=True)  # fmt: skip
        for note in evaluated.notes:
            print(f"{run.name}: {note}")
        results += [result for found in evaluated.tasks for result in results_of(found)]
    print()
    print(render_terminal(results_document(results)))
    print("\nresults: evaluations/ in each run's folder; make report STUDY=... shows those of a study")
    return 0


if __name__ == "__main__":
    run_command(main)
