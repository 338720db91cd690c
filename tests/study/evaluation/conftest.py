"""Local items of five tasks, the harness's index of them, and small models."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from study.evaluation.lm_eval_runs import load_tasks, quiet
from tests.hellaswag_items import FIXTURE

NAMES = ("hellaswag", "lambada_openai", "piqa", "arc_easy", "winogrande")
ITEMS = Path(__file__).parents[2] / "fixtures/lm_eval"


def write_task_data(folder: Path) -> Path:
    """A folder for TASK_DATA: invented items of every task."""
    shutil.copytree(ITEMS, folder)
    shutil.copyfile(FIXTURE, folder / "hellaswag.jsonl")
    return folder


@pytest.fixture(scope="session")
def small_manager() -> Any:
    """An index of these tasks alone: that of all tasks takes seconds."""
    quiet()
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders = [tasks / name for name in ("hellaswag", "lambada", "piqa", "arc", "winogrande")]
    return TaskManager(include_defaults=False, include_path=folders)


@pytest.fixture(scope="session")
def task_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_data(tmp_path_factory.mktemp("items") / "items")


@pytest.fixture(scope="session")
def local_tasks(task_data: Path, small_manager: Any) -> dict[str, Any]:
    return load_tasks(NAMES, task_data, small_manager)
