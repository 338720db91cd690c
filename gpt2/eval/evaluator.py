"""The evaluations of a run: perplexity on a fixed grid of tokens, HellaSwag at the end, and their history."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from gpt2.config.config import EvaluationConfig
from gpt2.data import tokenizer
from gpt2.eval import hellaswag, validation
from gpt2.model.transformer import GPT2, learned_scalars
from gpt2.system.resource_errors import out_of_memory
from gpt2.system.signals import Stop

Scored = TypeVar("Scored")


class Evaluator:
    """What a run has been found to score. `losses`: [tokens, train seconds, nats]; `learned`: [tokens, [p a layer]].

    Memory that runs out here costs no training: half as many tokens are scored at once from then on, and
    `note(message)` is told.
    """

    def __init__(
        self,
        model: GPT2,
        device: str,
        autocast: Callable[[], AbstractContextManager[Any]],
        windows: np.ndarray,
        settings: EvaluationConfig,
        stop: Stop,
        note: Callable[[str], None],
    ) -> None:
        self.model, self.device, self.autocast = model, device, autocast
        self.windows, self.settings, self.stop, self.note = (
            windows,
            settings,
            stop,
            note,
        )
        self.losses: list[list[float]] = []
        self.window_losses: list[float] = []  # of the last validation: mean nats of each window
        self.learned: list[list[Any]] = []
        self._block_size = windows.shape[1] - 1
        self._at_once = validation.EVALUATION_TOKENS[torch.device(device).type]

    def due(self, tokens: int) -> bool:
        """Whether a point of the fixed token grid was passed since the last evaluation (never at 0 tokens)."""
        every = self.settings.interval_tokens
        last = self.losses[-1][0] if self.losses else 0
        return every > 0 and tokens // every > last // every

    def done(self, tokens: int) -> bool:
        return bool(self.losses) and self.losses[-1][0] == tokens

    def validate(self, tokens: int, train_seconds: float) -> dict[str, Any]:
        """Validation loss on the fixed windows, and what the attentions have learned, into the history."""
        seen = self._fitting(
            lambda at_once: validation.perplexity(
                self.model,
                self.windows,
                max(1, at_once // self._block_size),
                self.device,
                self.autocast,
                stop=self.stop.check,
            )
        )
        self.losses.append([tokens, train_seconds, seen.loss])
        self.window_losses = seen.window_losses
        scalars = learned_scalars(self.model).get("alternation_probability")
        if scalars:
            self.learned.append([tokens, scalars])
        return {
            "event": "validation",
            "tokens": tokens,
            "train_seconds": train_seconds,
            "loss": seen.loss,
            "perplexity": seen.perplexity,
        }

    def score_hellaswag(self, source: Path) -> hellaswag.HellaSwag:
        """HellaSwag on the model as it is now."""
        items = hellaswag.load_items(source, self.settings.hellaswag_limit)
        return self._fitting(
            lambda at_once: hellaswag.score(
                self.model,
                items,
                tokenizer.load(),
                batch_tokens=at_once,
                block_size=self._block_size,
                device=self.device,
                autocast=self.autocast,
                stop=self.stop.check,
            )
        )

    def entries(self) -> dict[str, Any]:
        """The record's `validation` and `learned`."""
        best = min((loss for _, _, loss in self.losses), default=None)
        last = self.losses[-1][2] if self.losses else None
        learned = (
            {"alternation_probability": self.learned[-1][1], "history": self.learned}
            if self.learned
            else None
        )
        return {
            "validation": {
                "loss": last,
                "perplexity": perplexity_of(last),
                "best_perplexity": perplexity_of(best),
                "tokens": int(self.windows.shape[0]) * self._block_size,
                "history": self.losses,
            },
            "learned": learned,
        }

    def _fitting(self, score: Callable[[int], Scored]) -> Scored:
        """score(tokens at once), with half as many whenever memory runs out; the result does not depend on it."""
        while True:
            try:
                return score(self._at_once)
            except Exception as error:
                if not out_of_memory(error) or self._at_once <= self._block_size:
                    raise
            self._at_once //= 2
            self.note(f"evaluation ran out of memory: from there on {self._at_once} tokens at once")
            if self.device != "cpu":
                torch.cuda.empty_cache()


def hellaswag_entry(score: hellaswag.HellaSwag) -> dict[str, Any]:
    """The record's `hellaswag`."""
    value = dataclasses.asdict(score)
    kept = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "items", "items_sha256")
    return {key: value[key] for key in kept}


def perplexity_of(loss: float | None) -> float | None:
    """exp(loss), or None where there is no loss or the result is beyond a float."""
    return math.exp(loss) if loss is not None and loss < 700 else None
