"""GPT-2's byte-pair encoding through tiktoken, offline: the merges ship with the project (OpenAI, MIT licence)."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import tiktoken

from gpt2.config.config import VOCABULARY
from gpt2.system.errors import UserError

VOCABULARY_FILE = Path(__file__).with_name("vocab.bpe")
SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
EOT = VOCABULARY - 1  # the merges end before it
# The published pattern of GPT-2's pre-tokenizer, in the form that tiktoken uses for it.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class TokenizerError(UserError, RuntimeError):
    """The shipped vocabulary is not the published one."""


def _printable_bytes() -> dict[str, int]:
    """GPT-2 writes each byte as a printable character: itself where it is one, else from U+0100 upwards."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


def ranks(text: str) -> dict[bytes, int]:
    """Token bytes -> id, from the merges in vocab.bpe: the 256 bytes in GPT-2's order, then one id a merge."""
    byte_of = _printable_bytes()
    table = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in text.split("\n")[1:]:
        if line:
            token = bytes(byte_of[character] for part in line.split() for character in part)
            table[token] = len(table)
    return table


def fingerprint() -> str:
    """SHA-256 of the vocabulary; TokenizerError where the file is not the published one."""
    seen = hashlib.sha256(VOCABULARY_FILE.read_bytes()).hexdigest()
    if seen != SHA256:
        raise TokenizerError(
            f"{VOCABULARY_FILE} has SHA-256 {seen[:12]}..., not {SHA256[:12]}...; restore it with git"
        )
    return seen


@functools.cache
def load() -> tiktoken.Encoding:
    """The encoding of `tiktoken.get_encoding("gpt2")`, made without a network."""
    fingerprint()
    return tiktoken.Encoding(
        name="gpt2",
        explicit_n_vocab=VOCABULARY,
        pat_str=PATTERN,
        mergeable_ranks=ranks(VOCABULARY_FILE.read_text(encoding="utf-8")),
        special_tokens={"<|endoftext|>": EOT},
    )
