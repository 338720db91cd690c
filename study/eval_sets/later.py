"""Evaluate finished runs on texts that CONFIG_EVAL_SETS gained after their end. The driver's part needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from gpt2.artifacts import eval_sets
from gpt2.config.config import Config
from gpt2.config.eval_sets import EvalSet
from gpt2.data import eval_texts
from gpt2.system.read_files import DamagedFileError
from pages.markup import counted
from study.executors.child_process import EXIT_FINISHED, exit_text
from study.executors.executor import Executor, Task, run_tasks
from study.records.present import read_record

FLAG = "--eval-sets"  # of scripts.train

Run = tuple[str, int]  # variant, seed


def evaluated_names(run_dir: Path) -> set[str] | None:
    """Return the texts that a finished run was evaluated on; None where it is not finished."""
    record = read_record(run_dir)
    if record is None or record.status != "finished" or record.progress is None:
        return None
    names = set(record.eval_sets or {})
    with contextlib.suppress(DamagedFileError):
        names |= set(eval_sets.read(run_dir / eval_sets.FILE, record.run, record.progress.iterations))
    return names


def lacking(sets: Sequence[EvalSet], folders: dict[Run, Path]) -> list[Run]:
    """Return the finished runs that lack one of the sets."""
    wanted = {one.name for one in sets}
    if not wanted:
        return []
    found = {run: evaluated_names(folder) for run, folder in folders.items()}
    return [run for run, names in found.items() if names is not None and not wanted <= names]


def check_texts(config: Config, report: Callable[[str], None]) -> None:
    """Read every set and report its size. DataError for one that cannot be used."""
    for one in config.evaluation.sets:
        text = eval_texts.read_text(one, config.data, config.model.block_size, report)
        report(
            f"eval set {one.name}: {counted(len(text.documents), 'document')}, {counted(text.words, 'word')}, "
            f"{text.bytes:,} bytes, "
            f"{text.tokens:,} tokens"
        )


def evaluate_later(
    executor: Executor, directory: Path, folders: dict[Run, Path], runs: Sequence[Run]
) -> list[str]:
    """Evaluate finished runs in processes of `scripts.train`, as many at once as the executor has slots.

    Return a message for each run that could not be evaluated.
    """
    tasks = [
        Task(
            f"{folders[run].name} eval sets",
            (str(directory), run[0], str(run[1]), FLAG),
            folders[run],
            folders[run] / "log.txt",
        )
        for run in runs
    ]
    problems = []
    for task, ended in zip(tasks, run_tasks(executor, tasks), strict=True):
        if ended.status != EXIT_FINISHED:
            how = "lost with its machine" if ended.status is None else exit_text(ended.status)
            reason = ended.message.removeprefix("error: ") or how
            problems.append(f"{task.folder.name} is not evaluated on the new texts: {reason}")
    return problems
