"""gpt2.hellaswag prepares, scores and chooses as the harness's task hellaswag does, item by item."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from lm_eval import evaluate

from gpt2 import hellaswag, tokenizer
from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from study.evaluation.lm_eval_model import ScoredModel
from study.evaluation.lm_eval_runs import load_tasks
from tests.hellaswag_items import FIXTURE, REAL
from tests.published import published

PARTS = [
    "[header]",
    " [title]",
    " [step]",
    "[",
    "]",
    "\n",
    "  ",
    " ",
    "bread",
    "Ünïcode 日本",
    ".",
    "Don't",
    "x",
]


def small_model(name: str, block: int, seed: int = 0) -> tuple[GPT2, tokenizer.Tokenizer]:
    """Random weights, drawn wide so that choices differ."""
    encoding = tokenizer.load(name)
    padded = -(-(encoding.eot + 1) // 128) * 128
    sizes = {"layers": 1, "heads": 2, "width": 16, "block_size": block}
    model = GPT2(**sizes, vocabulary=encoding.eot + 1, padded_vocabulary=padded)
    initialise(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 10
    return model, encoding


def compare(path: Path, task: Any, model: GPT2, encoding: tokenizer.Tokenizer) -> list[bool]:
    """Compare everything, and return which items are right by acc_norm."""
    items = hellaswag.load_items(path, 0)
    ours = hellaswag.score(
        model,
        items,
        encoding,
        batch_tokens=500,
        block_size=model.block_size,
        device="cpu",
        autocast=contextlib.nullcontext,
    )
    theirs = evaluate(ScoredModel(model, encoding, contextlib.nullcontext), {"tasks": {"hellaswag": task}})
    samples = theirs["samples"]["hellaswag"]
    assert len(samples) == len(items)
    for item, sample, scores in zip(items, samples, ours.log_likelihoods, strict=True):
        assert sample["doc"]["query"] == item.query
        assert tuple(sample["doc"]["choices"]) == item.endings
        assert sample["doc"]["gold"] == item.label
        assert [answer[0] for answer in sample["filtered_resps"]] == pytest.approx(scores, rel=1e-5, abs=1e-4)
    assert [bool(sample["acc"]) for sample in samples] == ours.correct
    assert [bool(sample["acc_norm"]) for sample in samples] == ours.correct_norm
    for metric in ("acc", "acc_norm"):
        assert theirs["results"]["hellaswag"][f"{metric},none"] == pytest.approx(getattr(ours, metric))
        stderr = getattr(ours, f"{metric}_stderr")
        if stderr is not None and len(items) > 1:
            assert theirs["results"]["hellaswag"][f"{metric}_stderr,none"] == pytest.approx(stderr)
    return ours.correct_norm


def task_of(path: Path, manager: Any) -> Any:
    return load_tasks(["hellaswag"], path.parent, manager)["hellaswag"]


@pytest.mark.parametrize(("name", "block"), [("gpt2", 128), ("bytes", 40)])
def test_the_items_of_the_repository_are_scored_as_the_harness_does(
    name: str, block: int, task_data: Path, small_manager: Any
) -> None:
    assert FIXTURE.read_bytes() == (task_data / "hellaswag.jsonl").read_bytes()
    path = task_data / "hellaswag.jsonl"
    right = compare(path, task_of(path, small_manager), *small_model(name, block))
    assert 0 < sum(right) < len(right)


NO_QUERY = {
    "activity_label": "[",
    "ctx_a": "]",
    "ctx_b": "",
    "endings": ["a x", "b", "cc d", "[y] e"],
    "label": 3,
}
texts = st.lists(st.sampled_from(PARTS), min_size=1, max_size=7).map("".join)
items = st.fixed_dictionaries({
    "activity_label": texts,
    "ctx_a": texts,
    "ctx_b": st.one_of(st.just(""), texts),
    # Equal endings would be a tie, which rounding decides.
    "endings": st.tuples(*(texts.map(f"{{}} end {number}".format) for number in range(4))),
    "label": st.sampled_from([0, 1, 2, 3, "0", "3"]),
})  # fmt: skip


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)
@example([NO_QUERY, NO_QUERY | {"ctx_a": "]  "}])
@given(st.lists(items, min_size=3, max_size=8))
def test_items_with_brackets_spaces_and_other_alphabets_are_prepared_as_the_harness_does(
    tmp_path: Path, small_manager: Any, rows: list[dict[str, Any]]
) -> None:
    rows = [row | {"label": str(row["label"])} for row in rows]  # a column of the library has one type
    path = tmp_path / "hellaswag.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    compare(path, task_of(path, small_manager), *small_model("bytes", 64))


def test_published_items_are_scored_as_the_harness_does(tmp_path: Path, small_manager: Any) -> None:
    lines = published(REAL).read_text().splitlines()
    path = tmp_path / "hellaswag.jsonl"
    path.write_text("\n".join(lines[:: len(lines) // 60]) + "\n")
    right = compare(path, task_of(path, small_manager), *small_model("gpt2", 256))
    assert 0 < sum(right) < len(right)
