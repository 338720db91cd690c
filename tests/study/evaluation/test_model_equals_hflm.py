"""A run in the harness has the numbers of the harness's class for transformers on the exported run."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from gpt2 import tokenizer
from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from runtime.errors import UserError
from study.evaluation.export import export_run
from study.evaluation.lm_eval_model import RunModel, ScoredModel
from tests.study.evaluation.test_inspect import a_run, config_file

__all__ = ["config_file"]
pytestmark = pytest.mark.slow
ARMS = {"B": "GPT2", "RAALL": "BYTES"}  # and the tokenizer of each
BLOCK = 96
TEXTS = [
    ("The woman kneads", " dough on the floured table."),
    ("", "An empty context is the end of text."),
    ("A context that ends with spaces  ", "and is followed by é 日本."),
    ("word " * 80, "after more tokens than the block size has"),
]


@pytest.fixture(scope="module", params=ARMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> Any:
    """(ours, theirs): the same weights, ours from the run, theirs from its export."""
    folder = tmp_path_factory.mktemp("pair")
    lines = config_file.read_text().replace("CONFIG_GPT2_BLOCK_SIZE=32", f"CONFIG_GPT2_BLOCK_SIZE={BLOCK}")
    for name in ("GPT2", "BYTES"):
        chosen = ARMS[request.param] == name
        other = f"# CONFIG_TOKENIZER_{name} is not set" if chosen else f"CONFIG_TOKENIZER_{name}=y"
        line = f"CONFIG_TOKENIZER_{name}=y" if chosen else f"# CONFIG_TOKENIZER_{name} is not set"
        lines = lines.replace(other, line)
    (folder / "config").write_text(lines)
    run = a_run(folder, folder / "config", request.param)
    exported = export_run(run, folder / "out")
    ours = RunModel(run)
    theirs = HFLM(pretrained=str(exported.folder), device="cpu", dtype="float32", batch_size=3)
    assert ours.max_length == theirs.max_length == BLOCK
    return ours, theirs


def requests(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_log_likelihoods_and_greedy_flags_are_theirs(pair: Any) -> None:
    found, expected = (model.loglikelihood(requests("loglikelihood", TEXTS)) for model in pair)
    for (score, right), (other, wanted) in zip(found, expected, strict=True):
        assert score == pytest.approx(other, abs=1e-3, rel=1e-5)
        assert right == wanted
    assert len({round(score, 2) for score, _ in found}) == len(TEXTS)


def test_every_item_of_every_task_is_theirs(pair: Any, local_tasks: dict[str, Any]) -> None:
    whole = pair[0].eot_token_id == 256
    tasks = {name: task for name, task in local_tasks.items() if whole or name in ("lambada_openai", "piqa")}
    found, expected = (
        evaluate(model, {"tasks": tasks}, bootstrap_iters=20, log_samples=True) for model in pair
    )
    assert set(found["results"]) == set(tasks)
    for name, results in expected["results"].items():
        for key, value in results.items():
            if key not in ("alias", "name"):
                assert found["results"][name][key] == pytest.approx(value, rel=1e-4), (name, key)
        for one, other in zip(found["samples"][name], expected["samples"][name], strict=True):
            assert one["doc_hash"] == other["doc_hash"]
            for metric in other["metrics"]:
                assert one[metric] == pytest.approx(other[metric], rel=1e-4), (name, one["doc_id"], metric)
    assert len(found["samples"]["piqa"]) == 10


def test_a_continuation_longer_than_the_block_is_truncated_and_counted(pair: Any) -> None:
    ours, _ = pair
    ours.truncated = 0
    ids = [7] * (BLOCK + 20)
    (long,) = ours._loglikelihood_tokens([(None, [1, 2, 3], ids)])
    (cut,) = ours._loglikelihood_tokens([(None, [7], ids[:BLOCK])])
    assert long[0] == pytest.approx(cut[0], rel=1e-6)
    assert ours.truncated == 1


def test_a_task_that_asks_for_texts_is_refused_by_its_name() -> None:
    item = Instance("generate_until", {}, ("The", {"until": []}), 0, ("triviaqa", 0, 1))
    with pytest.raises(UserError, match=r"triviaqa scores texts.*; fix: "):
        tiny("bytes").generate_until([item])


def tiny(name: str) -> ScoredModel:
    """A model of two layers with random weights and the tokenizer of that name."""
    encoding = tokenizer.load(name)
    model = GPT2(
        layers=2,
        heads=2,
        width=16,
        block_size=48,
        vocabulary=encoding.eot + 1,
        padded_vocabulary=encoding.eot + 1,
    )
    initialise(model, 0)
    return ScoredModel(model, encoding, contextlib.nullcontext)


@pytest.mark.parametrize(("context", "continuation"), [("Ans", "wer"), ("-" * 32, "-" * 32), ("hel", "lo")])
def test_a_continuation_that_joins_the_context_is_scored_alone(context: str, continuation: str) -> None:
    ours = tiny("gpt2")
    given, scored = ours._encode_pair(context, continuation)
    assert scored
    assert ours.tokenizer.decode(given + scored) == context + continuation
    ((nats, greedy),) = ours.loglikelihood(requests("loglikelihood", [(context, continuation)]))
    ids = torch.tensor([given + scored])
    with torch.no_grad():
        logs = ours.model(ids).logits[0].log_softmax(-1)[len(given) - 1 : -1]
    assert nats == pytest.approx(float(logs.gather(1, torch.tensor([scored]).T).sum()), rel=1e-5)
    assert nats < -1
    assert greedy == (logs.argmax(-1).tolist() == scored)


@pytest.mark.parametrize("context", ["The answer:", ""])
def test_an_item_with_an_empty_continuation_is_refused_by_its_name(context: str) -> None:
    item = Instance("loglikelihood", {}, (context, ""), 0, ("piqa", 7, 1))
    with pytest.raises(UserError, match=r"item 7 of piqa has an empty continuation.*; fix: "):
        tiny("bytes").loglikelihood([item])
