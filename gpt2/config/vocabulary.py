"""The tokenizers of CONFIG_TOKENIZER_* and the sizes of their vocabularies. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.config.dotconfig import Symbols


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer (gpt2.data.tokenizer). size: with the end of text, which is the last id."""

    name: str
    size: int

    @property
    def padded(self) -> int:
        """Return the next multiple of 128, which matrix units need."""
        return -(-self.size // 128) * 128


GPT2 = Vocabulary("gpt2", 50257)
BYTES = Vocabulary("bytes", 257)
TOKENIZERS = {"TOKENIZER_GPT2": GPT2, "TOKENIZER_BYTES": BYTES}


def vocabulary(symbols: Symbols) -> Vocabulary:
    """Read the tokenizer."""
    return TOKENIZERS[symbols.choice(TOKENIZERS)]
