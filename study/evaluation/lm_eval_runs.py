"""Evaluate trained runs on tasks of lm-evaluation-harness, and keep the results with the run's record."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gpt2.initial_weights import state_digest
from runtime import records, run_record
from runtime.errors import UserError, first_sentences
from study.evaluation.lm_eval_model import RunModel
from study.evaluation.lm_eval_records import FILE, LmEvalRecord, Metric, TaskResult, read
from study.evaluation.lm_eval_tasks import questions_digest
from study.evaluation.loaded_runs import finished_record, require_last_weights

BOOTSTRAP = 1000  # resamples, of metrics without a formula for the standard error: 2 % of it
DIGITS = 9  # of a number of an item


@dataclass(frozen=True)
class EvaluatedTasks:
    """The record of a run. computed: the tasks that were evaluated now; the others existed. notes: on its weights."""

    record: LmEvalRecord
    computed: list[str]
    notes: list[str]


def evaluate_run(run_dir: Path, tasks: Mapping[str, Any]) -> EvaluatedTasks:
    """Evaluate the last weights of a finished run on tasks, and write lm_eval.json after each.

    Existing results of the same weights, items, task and harness are kept. UserError for an unfinished run, and for a
    value that is not finite.
    """
    record = finished_record(run_dir)
    model = RunModel(run_dir)
    require_last_weights(model.run, run_dir, record)
    weights = state_digest(model.run.model)
    found = read(run_dir)
    if found is None or found.weights != weights:
        found = LmEvalRecord(record.run, str(record.variant), record.seed, model.run.iteration, weights, ())
    computed = []
    for name, task in tasks.items():
        result = TaskResult(
            task=name,
            version=str(task.VERSION),
            harness=metadata.version("lm_eval"),
            questions=questions_digest(task),
            items=len(task.eval_docs),
            requests=0,
            truncated=0,
            number_format=model.number_format,
            metrics=(),
        )
        known = {(one.same_questions, one.number_format) for one in found.tasks}
        if (result.same_questions, result.number_format) in known:
            continue
        others = [one for one in found.tasks if one.task != name]
        result = _evaluate(model, task, result)
        found = found.replace(tasks=tuple(sorted([*others, result], key=lambda one: one.task)))
        records.write(run_dir / FILE, found, run_record.owner_at(run_dir))
        computed.append(name)
    return EvaluatedTasks(found, computed, list(model.run.notes))


def _evaluate(model: RunModel, task: Any, empty: TaskResult) -> TaskResult:
    """Ask the model a task. empty: the result without values."""
    from lm_eval import evaluate

    name, model.truncated = empty.task, 0
    output = io.StringIO()
    bars = sys.stderr if sys.stderr.isatty() else output  # the harness's progress
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(bars):
            found: Any = evaluate(model, {"tasks": {name: task}}, bootstrap_iters=BOOTSTRAP, log_samples=True)
    except AssertionError as error:  # the harness's refusals
        raise UserError(f"{name}: {first_sentences(error)}; fix: leave {name} out of TASKS") from error
    samples = found["samples"][name]
    metrics = _metrics(found["results"][name], samples)
    for metric in metrics:
        if not math.isfinite(metric.value):
            raise UserError(
                f"{model.run.name} on {name}: {metric.name} is {metric.value}, so there is no result; fix: leave "
                f"{name} out of TASKS"
            )
    chance = None
    if task.OUTPUT_TYPE == "multiple_choice":
        chances = [1 / len(task.doc_to_choice(one["doc"])) for one in samples]
        chance = sum(chances) / len(chances)
    return empty.replace(
        requests=len(task.instances),
        truncated=model.truncated,
        metrics=tuple(metrics),
        chance=chance,
    )


def _metrics(results: Mapping[str, Any], samples: list[dict[str, Any]]) -> list[Metric]:
    """Return the metrics of a task from the harness's results, "acc,none" and "acc_stderr,none"."""
    metrics = []
    for key, value in results.items():
        name, comma, chosen = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        stderr = results.get(f"{name}_stderr,{chosen}")
        answers = sorted((one for one in samples if one["filter"] == chosen), key=lambda one: one["doc_id"])
        values = [answer.get(name) for answer in answers]
        numbers = all(isinstance(value, (bool, int, float)) or hasattr(value, "item") for value in values)
        metrics.append(Metric(
            name=name if chosen == "none" else f"{name}, {chosen}",
            value=float(value),
            stderr=float(stderr) if isinstance(stderr, (int, float)) and math.isfinite(stderr) else None,
            items=tuple(float(f"{float(one):.{DIGITS}g}") for one in values) if numbers else (),  # type: ignore[arg-type]
        ))  # fmt: skip
    return metrics
