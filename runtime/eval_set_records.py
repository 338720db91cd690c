"""eval_sets.json of a run: its held-out texts window by window."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from runtime import records
from runtime.records import Count, Positive, Record, Text

FILE = "eval_sets.json"


class EvalSetEntry(Record, frozen=True):
    """The perplexity of a held-out text (gpt2.evaluator). loss: mean nats per token; null where it is not finite.

    text_sha256, tokens_sha256: of the documents, and of their tokens.
    """

    documents: Positive
    tokens: Positive
    words: Positive
    bytes: Positive
    loss: float | None
    perplexity: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float | None
    text_sha256: Text
    tokens_sha256: Text


class EvaluatedText(Record, frozen=True):
    """A text on a trained model. window_nats: of each window in the order of the text, with its scored tokens."""

    entry: EvalSetEntry
    device: Text
    dtype: Text
    window_tokens: tuple[Positive, ...]
    window_nats: tuple[float | None, ...]

    def __post_init__(self) -> None:
        if sum(self.window_tokens) != self.entry.tokens or len(self.window_nats) != len(self.window_tokens):
            raise ValueError(f"its windows have {sum(self.window_tokens)} tokens, not {self.entry.tokens}")


class EvalSetsFile(Record, frozen=True):
    """The texts that a run was evaluated on, by name, after these iterations."""

    run: Text
    iterations: Count
    sets: Mapping[str, EvaluatedText]


def write(run_dir: Path, run: str, iterations: int, found: Mapping[str, EvaluatedText]) -> None:
    """Write the texts of a run after these iterations."""
    records.write(run_dir / FILE, EvalSetsFile(run, iterations, found), records.owner(run_dir), indent=None)
