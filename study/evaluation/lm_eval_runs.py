"""Evaluate trained runs on tasks of lm-evaluation-harness, and keep the results with the run's record."""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import io
import json
import logging
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gpt2.initial_weights import state_digest
from gpt2.text_sources import probe_hub
from referee.numerics.text_files import json_lines
from referee.verdict.rows import Row
from runtime import run_record
from runtime.errors import UserError, first_sentences
from runtime.run_record import LaterEvaluation
from study.evaluation.lm_eval_model import RunModel
from study.evaluation.lm_eval_page import CHANCE, TRUNCATED, folder_of
from study.evaluation.loaded_runs import finished_record, require_last_weights

# Load tasks of lm-evaluation-harness, from local files where TASK_DATA names a folder, else from the hub.


KINDS = {".jsonl": "json", ".parquet": "parquet"}  # suffix -> builder of the library datasets
SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
PLACES = {
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "metadata",
    "tag",
    *SPLITS,
}  # not what a task asks
FEWSHOT_SEED = 1234  # the harness's default


def quiet() -> None:
    """Silence progress bars and remarks of the harness's libraries. Errors are still raised."""
    import datasets

    datasets.disable_progress_bars()
    for name in ("lm_eval", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)


@functools.cache
def task_manager() -> Any:
    """Return the harness's index of all its tasks. It takes seconds to build."""
    quiet()
    from lm_eval.tasks import TaskManager

    return TaskManager()


def load_tasks(names: Sequence[str], data: Path | None = None, manager: Any = None) -> dict[str, Any]:
    """Return the tasks by name, with their items. Groups and tags are replaced by their tasks.

    data: a folder with local files, DATA/<task>.jsonl or DATA/<task>/<split>*.jsonl (or .parquet). Nothing is
    downloaded then. UserError for an unknown task, and for items that are neither local nor on the hub.
    """
    quiet()
    if data is not None and not data.is_dir():
        raise UserError(
            f"TASK_DATA={data} is not a folder; fix: TASK_DATA= a folder with hellaswag.jsonl and others"
        )
    manager = manager or task_manager()
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            meant = f"did you mean {' or '.join(near)}?" if near else "python -m lm_eval ls tasks lists all"
            raise UserError(f"TASKS names {name}, which lm-evaluation-harness does not have; fix: {meant}")
    online = data is not None or _reach_hub()
    tasks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in dict.fromkeys(names):
            if data is None:
                why = "its items are not on this machine, and the hub cannot be reached" * (not online)
                tasks |= _load(name, manager, name, why, f"TASK_DATA= a folder with {name}.jsonl")
            else:
                local = {"group": "local", "task": [_local(name, data, cache, manager)]}
                fix = f"correct the files in {data}; items have the fields of the data set of {name}"
                tasks |= _load(local, manager, name, "", fix)
    return tasks


def _reach_hub() -> bool:
    """Return whether the hub answers; without it, let the libraries use their cache and not retry for minutes."""
    import datasets
    from huggingface_hub import constants

    try:
        probe_hub("TASKS")
    except UserError:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    return not datasets.config.HF_HUB_OFFLINE


def _load(wanted: Any, manager: Any, name: str, why: str, fix: str) -> dict[str, Any]:
    """Load tasks, zero-shot unless they say otherwise. why, fix: of the error, by default what the library says."""
    try:
        tasks: dict[str, Any] = manager.load([wanted])["tasks"]
        for task in tasks.values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
    except Exception as error:  # the libraries raise many kinds
        why = why or f"its items cannot be loaded ({first_sentences(error)})"
        raise UserError(f"{name}: {why}; fix: {fix} (docs/lm-eval.md)") from error
    return tasks


def _local(name: str, data: Path, cache: str, manager: Any) -> dict[str, Any]:
    """Return the specification of a task whose splits are local files."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path = manager.task_index[name].yaml_path
    config = load_yaml(path, resolve_func=False) if path else {}
    evaluated = config.get("test_split") or config.get("validation_split")
    if not evaluated:
        raise UserError(
            f"{name} is not a single task with a split of items; fix: TASKS= single tasks by name"
        )
    files = {
        split: _files(data / name, split, config) for split in {config.get(key) for key in SPLITS} if split
    }
    files[evaluated] = [
        path for path in (data / f"{name}{suffix}" for suffix in KINDS) if path.is_file()
    ] or files[evaluated]
    files = {split: paths for split, paths in files.items() if paths}
    if evaluated not in files:
        raise UserError(
            f"TASK_DATA={data} has no items of {name}; fix: {data / name}.jsonl, or {data / name}/{evaluated}*.jsonl "
            "(or .parquet)"
        )
    kinds = {KINDS[path.suffix] for paths in files.values() for path in paths}
    if len(kinds) > 1:
        raise UserError(f"{data / name} has files of two kinds; fix: keep only .jsonl or only .parquet")
    for path in (path for paths in files.values() for path in paths if path.suffix == ".jsonl"):
        _check_fields(path)
    shows = bool(config.get("num_fewshot"))  # a missing file of examples is an error then
    return {
        "task": name,
        "dataset_path": kinds.pop(),
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: [str(path.resolve()) for path in paths] for split, paths in files.items()},
            "cache_dir": cache,
            "keep_in_memory": True,
        },
        **{key: config.get(key) if shows or config.get(key) in files else None for key in SPLITS},
    }


def _files(folder: Path, split: str, config: dict[str, Any]) -> list[Path]:
    """Return the files of a split, which may lie as on the hub: in a folder of the configuration, or in data/."""
    inner = folder / str(config.get("dataset_name") or "")
    root = inner if inner.is_dir() else folder
    return [path for path in sorted(root.rglob(f"{split}*")) if path.suffix in KINDS]


def _check_fields(path: Path) -> None:
    """UserError for a broken line, and for a line with other fields than the first: they would be read as "None"."""
    first = None
    for where, row in json_lines(path):
        fields = sorted(row) if isinstance(row, dict) else None
        first = first or fields
        if fields is None or fields != first:
            shown = json.dumps(row)[:40] if fields is None else f"the fields {', '.join(fields) or 'none'}"
            needed = (
                f"the fields {', '.join(first)} of the first line"
                if first
                else "one object with fields a line"
            )
            raise UserError(f"{where} has {shown}; fix: {needed}")


def questions_digest(task: Any, harness: str = "") -> str:
    """Return the SHA-256 of what a task asks, how this version scores it, and its prepared items, in order."""
    config = {key: value for key, value in task.dump_config().items() if key not in PLACES}
    about = [harness, str(task.VERSION), config]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode())
    for item in task.eval_docs:
        digest.update(json.dumps(item, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


Scored = tuple[Row, list[float] | None]


@dataclass(frozen=True)
class EvaluatedTasks:
    """The results of a run. computed: the tasks that were evaluated now; the others existed. notes: on its weights."""

    tasks: list[LaterEvaluation]
    computed: list[str]
    notes: list[str]


def evaluate_run(run_dir: Path, tasks: Mapping[str, Any]) -> EvaluatedTasks:
    """Evaluate the last weights of a finished run on tasks, each an evaluation of the run.

    Existing results of the same weights, items, task and harness are kept. UserError for an unfinished run, and for a
    value that is not finite.
    """
    record = finished_record(run_dir)
    model = RunModel(run_dir)
    require_last_weights(model.run, run_dir, record)
    harness = metadata.version("lm_eval")
    about = {"weights": state_digest(model.run.model), "harness": harness}
    last = run_record.read_rows(run_dir, record)[0].replace(
        tokens=record.progress.tokens, platform=run_record.platform_of(model.number_format), items=0
    )
    results, computed = [], []
    for name, task in tasks.items():
        folder = folder_of(run_dir, name)
        row = last.replace(data=f"{name}@{questions_digest(task, harness)[:12]}")
        found = run_record.read_evaluation(folder, record)
        same = found and (found.about, {(one.data, one.platform) for one in found.rows}) == (
            about,
            {(row.data, row.platform)},
        )
        if not same:
            run_record.write_evaluation(folder, record, _evaluate(model, name, task, row), about)
            found = run_record.read_evaluation(folder, record)
            computed.append(name)
        assert found
        results.append(found)
    return EvaluatedTasks(results, computed, list(model.run.notes))


def _evaluate(model: RunModel, name: str, task: Any, row: Row) -> list[Scored]:
    """Ask the model a task. row: without metric and value."""
    from lm_eval import evaluate

    model.truncated = 0
    output = io.StringIO()
    bars = sys.stderr if sys.stderr.isatty() else output  # the harness's progress
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(bars):
            found: Any = evaluate(model, {"tasks": {name: task}}, bootstrap_iters=0, log_samples=True)
    except AssertionError as error:  # the harness's refusals
        raise UserError(f"{name}: {first_sentences(error)}; fix: leave {name} out of TASKS") from error
    samples = found["samples"][name]
    scored = [
        *_metrics(found["results"][name], samples, row.replace(items=len(task.eval_docs))),
        (row.replace(metric=TRUNCATED, value=model.truncated / len(task.instances)), None),
    ]
    if task.OUTPUT_TYPE == "multiple_choice":
        chances = [1 / len(task.doc_to_choice(one["doc"])) for one in samples]
        scored.append((row.replace(metric=CHANCE, value=sum(chances) / len(chances)), None))
    for one, _ in scored:
        if not math.isfinite(one.value):
            raise UserError(
                f"{model.run.name} on {name}: {one.metric} is {one.value}, so there is no result; fix: leave "
                f"{name} out of TASKS"
            )
    return scored


def _metrics(results: Mapping[str, Any], samples: list[dict[str, Any]], row: Row) -> list[Scored]:
    """Return the metrics of a task from the harness's results, "acc,none", with the values of their items."""
    scored: list[Scored] = []
    for key, value in results.items():
        name, comma, chosen = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        answers = sorted((one for one in samples if one["filter"] == chosen), key=lambda one: one["doc_id"])
        values = [answer.get(name) for answer in answers]
        numbers = all(isinstance(value, (bool, int, float)) or hasattr(value, "item") for value in values)
        metric = row.replace(metric=name if chosen == "none" else f"{name}, {chosen}", value=float(value))
        scored.append((metric, [float(one) for one in values] if numbers else None))  # type: ignore[arg-type]
    return scored
