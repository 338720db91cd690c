"""Load tasks of lm-evaluation-harness, from local files where TASK_DATA names a folder, else from the hub."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt2.text_sources import probe_hub
from referee.numerics.text_files import json_lines, read_json, text_parts
from runtime.errors import UserError, first_sentences, one_line

TEMPLATES = ("doc_to_text", "doc_to_target", "doc_to_choice")
CONDITIONAL = ("{%", "is defined", "default", " if ", " or ")  # an item of such a template may lack a field


def check_files(name: str, files: Mapping[str, Sequence[Path]], config: Mapping[str, Any]) -> None:
    """UserError for files without items, unreadable ones, and items without a field that the templates need.

    files: split -> its files. config: the task's definition, with functions as names.
    """
    wanted = needed_fields(config)
    for split, paths in files.items():
        count = 0
        for path in paths:
            for where, row in _rows(path):
                count += 1
                if not isinstance(row, dict):
                    raise UserError(
                        f"{where} is {json.dumps(row)[:40]}, not an item; fix: one object with fields a line, such as "
                        '{"text": "..."}'
                    )
                if missing := [field for field in wanted if field not in row]:
                    raise _missing(name, where, missing, row)
        if not count:
            raise UserError(
                f"{paths[0]} has no items of {name} (split {split}); fix: copy the file again, or take {name} out of "
                "TASKS"
            )


def missing_field(name: str, paths: Sequence[Path], error: BaseException | None) -> UserError | None:
    """Return the error for the field that a function of the task did not find. None where a field is not the cause."""
    while error is not None:
        if isinstance(error, KeyError) and error.args:
            field = str(error.args[0])
            for path in paths:
                for where, row in _rows(path):
                    if isinstance(row, dict) and field not in row:
                        return _missing(name, where, [field], row)
        error = error.__cause__ or error.__context__
    return None


def needed_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the fields of an item that the task's templates always use. Functions of the task may need others."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    if config.get("process_docs"):
        return []  # it may rename the fields
    found: dict[str, None] = {}
    templates = Environment()
    for key in TEMPLATES:
        text = config.get(key)
        if not isinstance(text, str) or any(word in text for word in CONDITIONAL):
            continue
        if key == "doc_to_target" and text.isidentifier() and config.get("output_type") == "multiple_choice":
            choices = config.get("doc_to_choice")
            if not (isinstance(choices, list) and text in choices):
                found[text] = None
        try:
            used = meta.find_undeclared_variables(templates.parse(text)) - set(templates.globals)
        except TemplateSyntaxError:
            continue
        found |= dict.fromkeys(sorted(used))
    return list(found)


def _missing(name: str, where: str, fields: Sequence[str], row: Mapping[str, Any]) -> UserError:
    present = ", ".join(map(str, row)) or "no field"
    return UserError(
        f"{where} has no {' and no '.join(fields)}, which {name} needs (it has {present}); "
        f"fix: add {' and '.join(fields)} to every item, in the form that the data set of {name} has on the hub"
    )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file and line or item, item). UserError for a broken file."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        try:
            table = parquet.ParquetFile(path)
            names, count = table.schema_arrow.names, table.metadata.num_rows
        except Exception as error:  # of pyarrow
            raise UserError(
                f"{path} is not a readable parquet file ({one_line(error)}); fix: copy the file again"
            ) from error
        if count:  # every row has every column
            yield str(path), dict.fromkeys(names)
        return
    if path.suffix == ".json" and next(text_parts(path), "").lstrip().startswith("["):  # one list
        rows = enumerate(read_json(path), 1)
        yield from ((f"{path}, item {number},", row) for number, row in rows)
    else:
        yield from json_lines(path)


KINDS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
}  # suffix -> builder of the library datasets
SPLITS = ("test_split", "validation_split", "training_split", "fewshot_split")
FEWSHOT_SEED = 1234  # the harness's default
# What a task asks and how it is scored; not where its data lie.
DEFINITION = (
    "task",
    "output_type",
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "process_docs",
    "process_results",
    "description",
    "target_delimiter",
    "fewshot_delimiter",
    "num_fewshot",
    "metric_list",
    "filter_list",
    "generation_kwargs",
    "repeats",
)


def quiet() -> None:
    """Silence progress bars and remarks of the harness and its libraries. Errors are still raised."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # of the bootstrap: its processes would import torch
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

    data: a folder with local files, DATA/<task>.jsonl (also .json, .parquet) or DATA/<task>/<split>*.jsonl. Nothing is
    downloaded then. UserError for an unknown task, and for items that are neither local nor on the hub.
    """
    quiet()
    if data is not None and not data.is_dir():
        raise UserError(
            f"TASK_DATA={data} is not a folder; fix: TASK_DATA= a folder with hellaswag.jsonl and others"
        )
    manager = manager or task_manager()
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            meant = f"did you mean {' or '.join(near)}?" if near else "python -m lm_eval ls tasks lists all"
            raise UserError(f"TASKS names {name}, which lm-evaluation-harness does not have; fix: {meant}")
    if data is None:
        return _from_hub(names, manager)
    leaves = [leaf for name in names for leaf in _leaves(name, manager)]
    with tempfile.TemporaryDirectory() as cache:
        specifications = [_local(leaf, data, cache, manager) for leaf in dict.fromkeys(leaves)]
        return {
            s["task"]: _load({"group": "local", "task": [s]}, s["task"], manager, paths=_paths(s))[s["task"]]
            for s in specifications
        }


def _leaves(name: str, manager: Any) -> list[str]:
    """Return the tasks of a tag. UserError for a group, whose tasks may change their data."""
    if name in manager.all_tags:
        return sorted(manager.task_index[name].tags)
    if name in manager.all_groups:
        raise UserError(
            f"{name} is a group of tasks, which TASK_DATA does not load; fix: TASKS= its tasks by name"
        )
    return [name]


def _from_hub(names: Sequence[str], manager: Any) -> dict[str, Any]:
    """Load tasks from the hub, or where it cannot be reached from the cache of the library datasets."""
    online = True
    try:
        probe_hub("TASKS")
    except UserError:
        online = False
    tasks: dict[str, Any] = {}
    for name in names:
        with _offline(not online):
            tasks |= _load(name, name, manager, online)
    return tasks


@contextmanager
def _offline(active: bool) -> Iterator[None]:
    """Let the library datasets use its cache alone, so that it does not retry for minutes."""
    import datasets
    from huggingface_hub import constants

    modules: tuple[Any, ...] = (datasets.config, constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = active or module.HF_HUB_OFFLINE
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _load(
    specification: Any, name: str, manager: Any, online: bool = True, paths: Sequence[Path] = ()
) -> dict[str, Any]:
    """Load tasks, zero-shot unless they say otherwise. paths: local files, for errors."""
    try:
        found: dict[str, Any] = manager.load([specification])["tasks"]
    except Exception as error:  # the libraries raise many kinds
        if missing := missing_field(name, paths, error):
            raise missing from error
        why = f"its items cannot be loaded ({first_sentences(error)})"
        if not online:
            why = "its items are not on this machine, and the hub cannot be reached"
        fix = f"TASK_DATA= a folder with {name}.jsonl (docs/lm-eval.md)"
        if paths:
            fix = f"correct {paths[0]}; it must have the fields of the data set of {name} (docs/lm-eval.md)"
        raise UserError(f"{name}: {why}; fix: {fix}") from error
    for task in found.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return found


def _local(name: str, data: Path, cache: str, manager: Any) -> dict[str, Any]:
    """Return the specification of a task whose splits are local files."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = manager.task_index[name]
    config = load_yaml(entry.yaml_path, resolve_func=False) if entry.yaml_path else dict(entry.cfg or {})
    evaluated = config.get("test_split") or config.get("validation_split")
    if not evaluated:
        raise UserError(f"{name} names no split of its items; fix: leave it out of TASKS")
    files = {
        str(split): found
        for split in dict.fromkeys(config.get(key) for key in SPLITS)
        if split and (found := _files(data, name, str(split), str(config.get("dataset_name") or "")))
    }
    alone = [path for path in (data / f"{name}{suffix}" for suffix in KINDS) if path.is_file()]
    files = {str(evaluated): alone[:1]} if alone else files
    if evaluated not in files:
        raise UserError(
            f"TASK_DATA={data} has no items of {name}; fix: {data / name}.jsonl, or {data / name}/{evaluated}*.jsonl "
            "(also .json and .parquet)"
        )
    kinds = {KINDS[path.suffix] for paths in files.values() for path in paths}
    if len(kinds) > 1:
        raise UserError(f"{data / name} has files of several kinds; fix: keep only .jsonl or only .parquet")
    if (
        config.get("num_fewshot")
        and (config.get("fewshot_split") or config.get("training_split")) not in files
    ):
        raise UserError(
            f"{name} shows the model {config['num_fewshot']} examples, and TASK_DATA={data} has no file of them; fix: "
            f"{data / name}/{config.get('fewshot_split') or config.get('training_split')}*.jsonl"
        )
    check_files(name, files, config)
    return {
        "task": name,
        "dataset_path": kinds.pop(),
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: [str(path.resolve()) for path in paths] for split, paths in files.items()},
            "cache_dir": cache,
            "keep_in_memory": True,
        },
        **{key: config[key] if config.get(key) in files else None for key in SPLITS},
    }


def _paths(specification: dict[str, Any]) -> list[Path]:
    """Return the local files of a specification."""
    return [Path(path) for paths in specification["dataset_kwargs"]["data_files"].values() for path in paths]


def _files(data: Path, name: str, split: str, configuration: str) -> list[Path]:
    """Return the files of a split in the first folder that has some. They may lie as on the hub."""
    root = data / name
    for folder in (root / configuration, root / "data", root):
        found = [path for path in sorted(folder.glob(f"{split}*")) if path.suffix in KINDS]
        if found:
            return found
    return []


def definition_digest(task: Any) -> str:
    """Return the SHA-256 of what a task asks and how it is scored."""
    config = task.dump_config()
    text = json.dumps({key: config.get(key) for key in DEFINITION}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def items_digest(task: Any) -> str:
    """Return the SHA-256 of the prepared items of a task, in order."""
    digest = hashlib.sha256()
    for item in task.eval_docs:
        digest.update(json.dumps(item, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
