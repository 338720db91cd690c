"""Held-out texts against lm-evaluation-harness itself: windows, nats and measures of its task wikitext."""

import contextlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gpt2 import evaluator, tokenizer, validation
from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2
from gpt2.validation import read_text
from runtime.settings import DataConfig, EvalSet
from study.evaluation.lm_eval_model import ScoredModel

RAW = (
    " \n = Robert <unk> = \n \n He was born in 1 @,@ 984 , in London . \n = = Career = = \n"
    " He said : \" it is good \" ( really ) . \n = = = Later = = = \n The actors ' guild ' s N members . \n"
    " = Second = \n It rose by 3 @.@ 5 ° C ; [ see ] { here } well @-@ known . \n"
    + " One more line of it . \n"
    * 9
)


def test_windows_are_those_of_the_harness() -> None:
    for length, count in itertools.product((1, 2, 8, 64), range(150)):
        tokens = list(range(1, count + 1))
        expected = [make_disjoint_window(one) for one in get_rolling_token_windows(tokens, 0, length, 1)]
        found = [
            (row[: len(row) - scored].tolist(), row[len(row) - scored :].tolist())
            for row, scored in evaluator.windows(np.array(tokens, dtype=np.int64), 0, length)
        ]
        assert found == [tuple(map(list, pair)) for pair in expected]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", sorted(tokenizer.ALL))
def test_a_model_has_the_measures_of_the_task_wikitext(name: str, tmp_path: Path) -> None:
    encoding = tokenizer.load(name)
    size = encoding.eot + 1
    model = GPT2(
        layers=1, heads=2, width=8, block_size=16, vocabulary=size, padded_vocabulary=-(-size // 128) * 128
    )
    initialise(model, seed=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    (tmp_path / "wiki.test.raw").write_text(RAW, encoding="utf-8")
    config = DataConfig("files", (), 0, tmp_path, 1, name)
    text = read_text(EvalSet("wikitext-2", str(tmp_path / "wiki.test.raw")), config, 16, report=print)
    score = evaluator.score(
        model,
        text,
        encoding.eot,
        batch_tokens=64,
        block_size=16,
        device="cpu",
        autocast=contextlib.nullcontext,
    )
    documents = [{"page": article} for article in validation.articles(RAW)]
    scored = ScoredModel(model, encoding, contextlib.nullcontext)
    requests = [
        Instance("loglikelihood_rolling", document, (wikitext_detokenizer(document),), number)
        for number, document in enumerate(documents)
    ]
    totals = [
        process_results(document, [nats])
        for document, nats in zip(documents, scored.loglikelihood_rolling(requests), strict=True)
    ]
    nats = -math.fsum(one["word_perplexity"][0] for one in totals)
    words, size_bytes = (sum(one[key][1] for one in totals) for key in ("word_perplexity", "byte_perplexity"))
    assert len(documents) == len(text.documents) == 2
    assert (text.words, text.bytes) == (words, size_bytes)
    assert math.fsum(score) == pytest.approx(nats, rel=1e-6)
