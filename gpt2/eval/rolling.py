"""Perplexity of a whole text by token, word and byte, as lm-evaluation-harness defines it (`loglikelihood_rolling`).

Each token of the text is scored once. A document is cut into windows of T = block size tokens, which do not overlap.
The first token of a document is conditioned on an end of text, that of a later window on the last token of the window
before. The last window of a longer document is extended to the left to T tokens of context, and only its new tokens
are scored. Source: `get_rolling_token_windows` with context_len 1 and `make_disjoint_window`, lm-evaluation-harness
0.4.13, lm_eval/utils.py.

    loss              nats of all tokens / tokens
    perplexity        exp(nats / tokens)
    word_perplexity   exp(nats / words)
    byte_perplexity   exp(nats / bytes)
    bits_per_byte     nats / (bytes ln 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpt2.data.eval_texts import EvalText
from gpt2.eval.token_rows import row_losses
from gpt2.model.transformer import GPT2
from runtime.eval_set_records import EvalSetEntry
from runtime.run_record import bits_per_byte

MOST_NATS = 230.0  # of a word: its exponential is below the largest number in a record, 1e100
Window = tuple[np.ndarray, int]  # context and targets, at most T+1 tokens; the number of targets, at its end


@dataclass(frozen=True)
class TextScore:
    """Nats of each window in the order of the text, with its number of scored tokens."""

    window_nats: list[float]
    window_tokens: list[int]

    @property
    def nats(self) -> float:
        """The sum over the text."""
        return math.fsum(self.window_nats)


def windows(tokens: np.ndarray, prefix: int, length: int) -> Iterator[Window]:
    """Yield the windows of a document, with `length` targets each but for a last one of fewer.

    prefix: the token before the first one.
    """
    first = min(length, len(tokens))
    if first:
        yield np.concatenate(([prefix], tokens[:first])), first
    for start in range(first, len(tokens), length):
        end = min(start + length, len(tokens))
        yield tokens[end - length - 1 : end], end - start


def score(
    model: GPT2,
    text: EvalText,
    prefix: int,
    *,
    batch_tokens: int,
    block_size: int,
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    stop: Callable[[], None] | None = None,
) -> TextScore:
    """Score all tokens of a text. prefix: the end of text. The other arguments: those of `row_losses`."""
    rows = [window for document in text.documents for window in windows(document, prefix, block_size)]
    nats = row_losses(model, rows, batch_tokens=batch_tokens, device=device, autocast=autocast, stop=stop)
    return TextScore(nats, [scored for _, scored in rows])


def entry(text: EvalText, score: TextScore) -> EvalSetEntry:
    """Return the record of a text. A perplexity is None where it is not finite or above 1e99."""
    nats, tokens = score.nats, text.tokens
    loss = nats / tokens if math.isfinite(nats) else None
    return EvalSetEntry(
        documents=len(text.documents),
        tokens=tokens,
        words=text.words,
        bytes=text.bytes,
        loss=loss,
        perplexity=_exp(nats / tokens),
        word_perplexity=_exp(nats / text.words),
        byte_perplexity=_exp(nats / text.bytes),
        bits_per_byte=bits_per_byte(loss, tokens, text.bytes),
        text_sha256=text.text_sha256,
        tokens_sha256=text.tokens_sha256,
    )


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < MOST_NATS else None
