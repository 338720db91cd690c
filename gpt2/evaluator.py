"""Evaluate a run: perplexity on a fixed grid of tokens and their history; items and held-out texts at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gpt2 import hellaswag, validation
from gpt2.tokenizer import Tokenizer
from gpt2.transformer import GPT2, learned_scalars
from gpt2.validation import EvalText, perplexity_of, read_text, row_losses
from referee.verdict.rows import Row
from runtime import ranks, records
from runtime.errors import UserError, out_of_memory
from runtime.run_record import bits_per_byte
from runtime.settings import Config, EvaluationConfig
from runtime.signals import Stop

Window = tuple[np.ndarray, int]  # context and targets, at most T+1 tokens; the number of targets, at its end


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
) -> list[float]:
    """Return the nats of each window of a text. prefix: the end of text. Other arguments: those of `row_losses`."""
    rows = [window for document in text.documents for window in windows(document, prefix, block_size)]
    return row_losses(model, rows, batch_tokens=batch_tokens, device=device, autocast=autocast, stop=stop)


def text_rows(folder: Path, row: Row, text: EvalText, nats: list[float]) -> list[Row]:
    """Write the nats of each window; return the rows of the loss and of the counts. row: of the model."""
    row = row.replace(data=f"{text.name}@{text.text_sha256[:12]}")
    loss = records.write_items(folder, row.replace(value=math.fsum(nats) / text.tokens), nats)
    counts = {
        "documents": len(text.documents),
        "tokens": text.tokens,
        "words": text.words,
        "bytes": text.bytes,
    }
    return [loss, *(row.replace(metric=name, value=count) for name, count in counts.items())]


Scored = TypeVar("Scored")
ALTERNATION = "alternation_probability"


class Evaluator:
    """Evaluations of one run. `losses`: [tokens, train seconds, nats]; `learned`: [tokens, [p per layer]].

    scalars: [tokens, name, [value per layer that has it]] of the other learned scalars.

    If memory runs out, batches are halved from then on and `note(message)` is called. Training goes on.
    """

    def __init__(
        self,
        model: GPT2,
        device: str,
        autocast: Callable[[], AbstractContextManager[Any]],
        windows: np.ndarray,
        tokenizer: Tokenizer,
        settings: EvaluationConfig,
        stop: Stop,
        note: Callable[[str], None],
    ) -> None:
        self.model, self.device, self.autocast = model, device, autocast
        self.windows, self.tokenizer = windows, tokenizer
        self.settings, self.stop, self.note = settings, stop, note
        self.losses: list[list[float]] = []
        self.window_losses: list[float] = []  # of the last validation: mean nats per window
        self.learned: list[list[Any]] = []
        self.scalars: list[list[Any]] = []
        self._block_size = windows.shape[1] - 1
        self.tokens = int(windows.shape[0]) * self._block_size
        self.text_bytes = len(tokenizer.decode_bytes(windows[:, 1:].ravel().tolist()))
        self._batch_tokens = validation.evaluation_tokens(device)

    def history(self) -> dict[str, list[Any]]:
        """Return the results so far, as a checkpoint saves them for `restore`."""
        return {"losses": self.losses, "learned": self.learned, "scalars": self.scalars}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.losses, self.learned, self.scalars = saved["losses"], saved["learned"], saved["scalars"]

    def due(self, tokens: int) -> bool:
        """Whether training passed a point of the token grid since the last evaluation (never at 0 tokens)."""
        every = self.settings.interval_tokens
        last = self.losses[-1][0] if self.losses else 0
        return every > 0 and tokens // every > last // every

    def done(self, tokens: int) -> bool:
        """Whether the last evaluation was at `tokens`."""
        return bool(self.losses) and self.losses[-1][0] == tokens

    def validate(self, tokens: int, train_seconds: float) -> dict[str, Any]:
        """Append validation loss and learned scalars to the history; return the event for the log."""
        result = self._retry_smaller(
            lambda batch_tokens: validation.perplexity(
                self.model,
                self.windows,
                max(1, batch_tokens // self._block_size),
                self.device,
                self.autocast,
                stop=self.stop.check,
            )
        )
        self.losses.append([tokens, train_seconds, result.loss])
        self.window_losses = result.window_losses
        scalars = learned_scalars(self.model)
        if ALTERNATION in scalars:
            self.learned.append([tokens, scalars.pop(ALTERNATION)])
        self.scalars += [[tokens, name, values] for name, values in scalars.items()]
        return {
            "event": "validation",
            "tokens": tokens,
            "train_seconds": train_seconds,
            "loss": result.loss,
            "perplexity": result.perplexity,
        }

    def score_items(self, items: Sequence[hellaswag.Item]) -> hellaswag.HellaSwag:
        """Score items of four endings on the current model."""
        return self._retry_smaller(
            lambda batch_tokens: hellaswag.score(
                self.model,
                items,
                self.tokenizer,
                batch_tokens=batch_tokens,
                block_size=self._block_size,
                device=self.device,
                autocast=self.autocast,
                stop=self.stop.check,
            )
        )

    def score_text(self, text: EvalText) -> list[float]:
        """Return the nats of each window of a held-out text on the current model."""
        return self._retry_smaller(
            lambda batch_tokens: score(
                self.model,
                text,
                self.tokenizer.eot,
                batch_tokens=batch_tokens,
                block_size=self._block_size,
                device=self.device,
                autocast=self.autocast,
                stop=self.stop.check,
            )
        )

    def entries(self) -> dict[str, Any]:
        """Return the record's `validation`, `learned` and `scalars`."""
        best = min((loss for _, _, loss in self.losses), default=None)
        last = self.losses[-1][2] if self.losses else None
        learned = None
        if self.learned:
            learned = {ALTERNATION: self.learned[-1][1], "history": self.learned}
        others = {"scalars": self.scalars} if self.scalars else {}
        return others | {
            "validation": {
                "loss": last,
                "perplexity": perplexity_of(last),
                "best_perplexity": perplexity_of(best),
                "tokens": self.tokens,
                "history": self.losses,
                "bytes": self.text_bytes,
                "bits_per_byte": bits_per_byte(last, self.tokens, self.text_bytes),
            },
            "learned": learned,
        }

    def _retry_smaller(self, score: Callable[[int], Scored]) -> Scored:
        """Call score(tokens per batch); halve the batch when memory runs out. The result does not depend on it."""
        while True:
            try:
                return score(self._batch_tokens)
            except Exception as error:
                if not out_of_memory(error) or self._batch_tokens <= self._block_size:
                    raise
            self._batch_tokens //= 2
            self.note(f"evaluation ran out of memory; its batches now have {self._batch_tokens} tokens")
            if self.device != "cpu":
                torch.get_device_module(self.device).empty_cache()


def hellaswag_entry(score: hellaswag.HellaSwag) -> dict[str, Any]:
    """Return the record's `hellaswag` or `choice`."""
    names = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "items", "items_sha256")
    return {name: value for name in names if (value := getattr(score, name)) is not None}


def hellaswag_rows(folder: Path, row: Row, score: hellaswag.HellaSwag) -> list[Row]:
    """Write which items are right; return the rows of the accuracies. row: with the items and the model."""
    return [
        records.write_items(folder, row.replace(metric="acc", value=score.acc), score.correct),
        records.write_items(folder, row.replace(metric="acc_norm", value=score.acc_norm), score.correct_norm),
    ]


def evaluate_sets(
    config: Config, evaluator: Evaluator, announce: Callable[[str], None], note: Callable[[str], None]
) -> Iterator[tuple[EvalText, list[float]]]:
    """Yield each set with the nats of its windows. A set that cannot be read on any rank is left out, with a note.

    announce: called with the work that begins.
    """
    for one in config.evaluation.sets:
        announce(f"evaluating {one.name}")
        text: EvalText | None = None
        problem = "another rank could not read it"
        try:
            text = read_text(one, config.data, config.model.block_size, report=announce)
        except (UserError, OSError) as error:
            problem = " ".join(f"{error}".split())
        if any(ranks.agree(text is None)) or text is None:
            note(f"{one.name} is not evaluated: {problem}")
        else:
            yield text, evaluator.score_text(text)
