"""Tasks from local files: which files are read, and what is refused in one line."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as arrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from runtime.errors import UserError
from study.evaluation.lm_eval_runs import load_tasks, questions_digest
from tests.study.evaluation.conftest import NAMES


def test_every_task_has_its_local_items_and_no_other(local_tasks: dict[str, Any], task_data: Path) -> None:
    assert tuple(local_tasks) == NAMES
    counts = {name: len(task.eval_docs) for name, task in local_tasks.items()}
    assert counts == {"hellaswag": 12, "lambada_openai": 10, "piqa": 10, "arc_easy": 10, "winogrande": 10}
    first = json.loads((task_data / "piqa.jsonl").read_text().splitlines()[0])
    assert {key: local_tasks["piqa"].eval_docs[0][key] for key in first} == first


def test_parquet_files_as_on_the_hub_give_the_same_items(
    tmp_path: Path, task_data: Path, small_manager: Any, local_tasks: dict[str, Any]
) -> None:
    rows = [json.loads(line) for line in (task_data / "piqa.jsonl").read_text().splitlines()]
    for part, chosen in (("00000", rows[:4]), ("00001", rows[4:])):
        path = tmp_path / f"piqa/data/validation-{part}-of-00002.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.Table.from_pylist(chosen), path)
    task = load_tasks(["piqa"], tmp_path, small_manager)["piqa"]
    assert questions_digest(task) == questions_digest(local_tasks["piqa"])


def test_a_folder_of_the_configuration_is_preferred(
    tmp_path: Path, task_data: Path, small_manager: Any
) -> None:
    """ai2_arc has ARC-Easy/ and ARC-Challenge/ in one repository of the hub."""
    (tmp_path / "arc_easy/ARC-Easy").mkdir(parents=True)
    lines = (task_data / "arc_easy/test-00000.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "arc_easy/ARC-Easy/test.jsonl").write_text("".join(lines[:3]))
    (tmp_path / "arc_easy/test.jsonl").write_text("".join(lines))
    assert len(load_tasks(["arc_easy"], tmp_path, small_manager)["arc_easy"].eval_docs) == 3


def test_the_digest_changes_with_items_and_with_the_definition(
    tmp_path: Path, task_data: Path, small_manager: Any, local_tasks: dict[str, Any]
) -> None:
    text = (task_data / "winogrande.jsonl").read_text()
    (tmp_path / "winogrande.jsonl").write_text(text.replace("bread", "rolls"))
    other = load_tasks(["winogrande"], tmp_path, small_manager)["winogrande"]
    assert questions_digest(other) != questions_digest(local_tasks["winogrande"])
    (tmp_path / "winogrande.jsonl").write_text(text)
    same = load_tasks(["winogrande"], tmp_path, small_manager)["winogrande"]
    assert questions_digest(same) == questions_digest(local_tasks["winogrande"])
    same.set_config(key="description", value="Answer. ")
    assert questions_digest(same) != questions_digest(local_tasks["winogrande"])


@pytest.mark.parametrize(
    ("name", "says"),
    [("helaswag", "did you mean hellaswag"), ("arc_challenge", "has no items of arc_challenge")],
)
def test_unknown_tasks_and_missing_files_are_refused(
    name: str, says: str, task_data: Path, small_manager: Any
) -> None:
    with pytest.raises(UserError, match=says):
        load_tasks([name], task_data, small_manager)


PIQA = '{"goal": "a", "sol1": "b", "sol2": "c", "label": 0}\n'


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("piqa.jsonl", "", "piqa"),
        ("piqa.jsonl", PIQA + '{"goal": "x",\n', "piqa.jsonl:2 is not JSON"),
        ("piqa.jsonl", PIQA + "[1]\n", r"piqa.jsonl:2 has \[1\]"),
        ("piqa.jsonl", '{"goal": "a"}\n' * 2, "items have the fields of the data set of piqa"),
        ("piqa.jsonl", PIQA + '{"goal": "a", "sol1": "b", "label": 0}\n', "piqa.jsonl:2 has the fields goal"),
        ("piqa.jsonl", PIQA + PIQA.replace("b", "\udce4"), "piqa.jsonl:2 is not UTF-8"),
        ("piqa.parquet", "PAR1", "piqa: its items cannot be loaded"),
    ],
)
def test_empty_broken_and_incomplete_files_are_refused(
    file: str, content: str, says: str, tmp_path: Path, small_manager: Any
) -> None:
    (tmp_path / file).write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=says):
        load_tasks([Path(file).stem], tmp_path, small_manager)


def test_without_local_files_and_without_a_hub_the_refusal_names_the_fix_and_nothing_is_retried(
    small_manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    asked = []
    original = datasets.load_dataset

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append(datasets.config.HF_HUB_OFFLINE)
        return original(*arguments, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError) as refused:
        load_tasks(["piqa"], None, small_manager)
    assert asked == [True]
    assert "fix: TASK_DATA=" in str(refused.value)
