"""Evaluate a model of transformers as a run is evaluated, to compare its scores with published numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

from gpt2.data import dataset, tokenizer
from gpt2.eval import hellaswag_download
from gpt2.eval.evaluator import Evaluator
from gpt2.eval.held_out import evaluate_sets
from gpt2.eval.hellaswag import load_items
from gpt2.interop.pretrained import PretrainedError, load_pretrained, read_shape
from gpt2.train.step import autocast
from runtime import attention_kernels
from runtime.settings import Config
from runtime.signals import Stop


def evaluate_pretrained(folder: Path, config: Config) -> list[str]:
    """Return lines on the validation perplexity, the texts of CONFIG_EVAL_SETS and HellaSwag, in float32.

    config: gives data, evaluation and device. Shape, block size and tokenizer are those of the folder.
    """
    shape, vocabulary = read_shape(folder)
    config = replace(
        config,
        model=shape,
        data=replace(config.data, tokenizer=vocabulary.name),
        target=replace(config.target, dtype="float32"),
    )
    resolved = attention_kernels.prepare_device(config.target, shape)
    model = load_pretrained(folder, shape).to(resolved.device)
    corpus = dataset.open_corpus(dataset.prepare(config.data, report=print))
    evaluator = Evaluator(
        model,
        resolved.device,
        functools.partial(autocast, resolved.device, resolved.dtype),
        dataset.validation_windows(corpus.validation, shape.block_size, config.evaluation.tokens),
        tokenizer.load(vocabulary.name),
        config.evaluation,
        Stop(),
        print,
    )
    loss = evaluator.validate(0, 0.0)["loss"]
    if not math.isfinite(loss):
        raise PretrainedError(f"{folder}: the validation loss is {loss}; fix: copy the weights again")
    lines = [
        f"{folder}: {shape.layers} layers, {shape.heads} heads, width {shape.width}, {shape.block_size} positions, "
        f"{vocabulary.size:,} tokens, on {resolved.device_name} in float32",
        f"validation loss {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}, on {evaluator.tokens:,} tokens",
    ]
    texts = evaluate_sets(config, evaluator, resolved, print, lines.append)
    for name, text in texts.items():
        by_token, by_word = text.entry.perplexity or math.nan, text.entry.word_perplexity or math.nan
        lines.append(f"{name}: perplexity {by_token:.2f} by token, {by_word:.2f} by word")
    return [*lines, _hellaswag(evaluator, config)]


def _hellaswag(evaluator: Evaluator, config: Config) -> str:
    if not config.evaluation.hellaswag:
        return "HellaSwag is not scored: CONFIG_HELLASWAG is off"
    source = hellaswag_download.obtain(config.evaluation, config.data.directory, report=print)
    if isinstance(source, str):
        return f"HellaSwag is not scored: {source}"
    score = evaluator.score_items(load_items(source, config.evaluation.hellaswag_limit))
    return f"HellaSwag: acc {100 * score.acc:.1f} %, acc_norm {100 * score.acc_norm:.1f} %, {score.items:,} items"
