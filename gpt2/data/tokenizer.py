"""Load GPT-2's byte-pair encoding offline, through tiktoken. The merges ship with the project (OpenAI, MIT licence)."""

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
# The published pattern of GPT-2's pre-tokenizer, in tiktoken's form.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class TokenizerError(UserError, RuntimeError):
    """The vocabulary file differs from the published one."""


def _printable_bytes() -> dict[str, int]:
    """Map GPT-2's printable characters to bytes. A byte without a printable character uses U+0100 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


def ranks(text: str) -> dict[bytes, int]:
    """Map token bytes to ids: the 256 bytes in GPT-2's order, then one id for each merge in vocab.bpe."""
    byte_of = _printable_bytes()
    table = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in text.split("\n")[1:]:
        if line:
            token = bytes(byte_of[character] for part in line.split() for character in part)
            table[token] = len(table)
    return table


def fingerprint() -> str:
    """Return the SHA-256 of the vocabulary. TokenizerError where the file differs from the published one."""
    found = hashlib.sha256(VOCABULARY_FILE.read_bytes()).hexdigest()
    if found != SHA256:
        raise TokenizerError(
            f"{VOCABULARY_FILE} has SHA-256 {found[:12]}..., not {SHA256[:12]}...; fix: git checkout {VOCABULARY_FILE}"
        )
    return found


@functools.cache
def load() -> tiktoken.Encoding:
    """Build the encoding of `tiktoken.get_encoding("gpt2")` without a network."""
    fingerprint()
    return tiktoken.Encoding(
        name="gpt2",
        explicit_n_vocab=VOCABULARY,
        pat_str=PATTERN,
        mergeable_ranks=ranks(VOCABULARY_FILE.read_text(encoding="utf-8")),
        special_tokens={"<|endoftext|>": EOT},
    )
