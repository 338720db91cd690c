"""Evaluate trained runs on tasks of lm-evaluation-harness, and keep the results beside the run's record."""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gpt2.initial_weights import state_digest
from runtime.errors import UserError
from study.evaluation import lm_eval_records as records
from study.evaluation.lm_eval_model import NAME, RunModel
from study.evaluation.lm_eval_records import LmEvalRecord, Metric, TaskResult
from study.evaluation.lm_eval_tasks import definition_digest, items_digest
from study.evaluation.loaded_runs import finished_record, require_last_weights

BOOTSTRAP = 1000  # resamples, of metrics without a formula for the standard error: 2 % of it
DIGITS = 9  # of a number of an item


@dataclass(frozen=True)
class EvaluatedTasks:
    """The record of a run. computed: the tasks that were evaluated now; the others existed. notes: on its weights."""

    record: LmEvalRecord
    computed: list[str]
    notes: list[str]


def evaluate_run(
    run_dir: Path,
    tasks: Mapping[str, Any],
    progress: Callable[[str, int, int], None] = lambda task, finished, rows: None,
) -> EvaluatedTasks:
    """Evaluate the last weights of a finished run on tasks, and write lm_eval.json after each.

    Existing results of the same weights, items, task and harness are kept. progress(task, finished rows, all rows) is
    called after each batch. UserError for an unfinished run, and for a value that is not finite.
    """
    from lm_eval.api.registry import get_model

    record = finished_record(run_dir)
    model: RunModel = get_model(NAME).create_from_arg_obj({"run": str(run_dir)})
    require_last_weights(model.run, run_dir, record)
    weights = state_digest(model.model)
    found = records.read(run_dir)
    if found is None or found.weights != weights:
        found = LmEvalRecord(record.run, str(record.variant), record.seed, model.run.iteration, weights, ())
    computed = []
    for name, task in tasks.items():
        head = _head(name, task, model)
        existing = next((result for result in found.tasks if result.task == name), None)
        if existing is not None and existing.identity == head.identity:
            continue

        def report(finished: int, rows: int, name: str = name) -> None:
            progress(name, finished, rows)

        model.progress = report
        result = _evaluate(model, task, head)
        others = [one for one in found.tasks if one.task != name]
        found = replace(found, tasks=tuple(sorted([*others, result], key=lambda one: one.task)))
        records.write(run_dir, found)
        computed.append(name)
    return EvaluatedTasks(found, computed, list(model.run.notes))


def _head(name: str, task: Any, model: RunModel) -> TaskResult:
    """Return a result without values: what identifies it."""
    return TaskResult(
        task=name,
        version=str(task.VERSION),
        harness=metadata.version("lm_eval"),
        definition=definition_digest(task),
        items_sha256=items_digest(task),
        items=len(task.eval_docs),
        requests=0,
        truncated=0,
        number_format=model.number_format,
        device=model.device_name,
        torch=torch.__version__,
        seconds=0.0,
        metrics=(),
    )


def _evaluate(model: RunModel, task: Any, head: TaskResult) -> TaskResult:
    """Ask the model a task."""
    from lm_eval import evaluate

    began = time.monotonic()
    model.truncated = 0
    output = io.StringIO()  # the harness's progress bars
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        found: Any = evaluate(
            model, {"tasks": {head.task: task}}, bootstrap_iters=BOOTSTRAP, log_samples=True
        )
    metrics = _metrics(
        found["results"][head.task], found["samples"][head.task], found["higher_is_better"][head.task]
    )
    for metric in metrics:
        if not math.isfinite(metric.value):
            raise UserError(
                f"{model.run.name} on {head.task}: {metric.name} is {metric.value}, so there is no result; fix: leave "
                f"{head.task} out of TASKS"
            )
    return replace(
        head,
        requests=len(task.instances),
        truncated=model.truncated,
        seconds=round(time.monotonic() - began, 3),
        metrics=tuple(metrics),
        chance=_chance(task, found["samples"][head.task]),
    )


def _chance(task: Any, samples: list[dict[str, Any]]) -> float | None:
    """Return the accuracy of guessing among the choices of each item; None for another kind of task."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    first = samples[0]["filter"]
    choices = [len(task.doc_to_choice(one["doc"])) for one in samples if one["filter"] == first]
    return sum(1 / number for number in choices) / len(choices)


def _metrics(
    results: Mapping[str, Any], samples: list[dict[str, Any]], higher: Mapping[str, bool]
) -> list[Metric]:
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
        items = [float(value) for value in values] if numbers and values else None  # type: ignore[arg-type]
        marks = items is not None and set(items) <= {0.0, 1.0}
        metrics.append(Metric(
            name=name,
            filter=chosen,
            value=float(value),
            higher_is_better=bool(higher.get(name, True)),
            stderr=float(stderr) if isinstance(stderr, (int, float)) and math.isfinite(stderr) else None,
            right="".join(str(int(item)) for item in items) if marks and items else None,
            items=tuple(float(f"{item:.{DIGITS}g}") for item in items) if items and not marks else None,
        ))  # fmt: skip
    return metrics
