"""The tokenizers: GPT-2's byte-pair encoding, offline through tiktoken, and the bytes of UTF-8.

vocab.bpe ships with the project (OpenAI, MIT licence). Each tokenizer has one id more than its vocabulary of text: the
end of text (EOT), which encodes no byte. Import needs the standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from referee.numerics.text_files import whole_characters
from runtime.errors import UserError
from runtime.settings import BYTES, GPT2

if TYPE_CHECKING:
    import tiktoken

VOCABULARY_FILE = Path(__file__).with_name("vocab.bpe")
SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END_OF_TEXT = "<|endoftext|>"
MARK = re.compile(r"<\|\w{1,40}\|>")  # letters that are a special token elsewhere, as END_OF_TEXT
# The published pattern of GPT-2's pre-tokenizer, in tiktoken's form.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class TokenizerError(UserError, RuntimeError):
    """The vocabulary file differs from the published one."""


class Tokenizer(Protocol):
    """Text to ids 0 .. eot - 1 and back. fingerprint: SHA-256; equal for tokenizers that give equal ids.

    bytes_per_token: of English text, for estimates.
    """

    eot: int
    unit: str  # one id in words
    bytes_per_token: int

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. END_OF_TEXT in it is ordinary text; surrogates are joined or replaced."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of the ids; an EOT has none."""


class Gpt2Tokenizer:
    """The encoding of `tiktoken.get_encoding("gpt2")`."""

    eot = GPT2.size - 1  # the merges end before it
    unit = "GPT-2 token"
    bytes_per_token = 4

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the vocabulary. TokenizerError where the file differs from the published one."""
        found = hashlib.sha256(VOCABULARY_FILE.read_bytes()).hexdigest()
        if found != SHA256:
            raise TokenizerError(
                f"{VOCABULARY_FILE} has SHA-256 {found[:12]}..., not {SHA256[:12]}...; fix: git checkout "
                f"{VOCABULARY_FILE}"
            )
        return found

    @functools.cached_property
    def encoding(self) -> tiktoken.Encoding:
        """Build the encoding without a network."""
        import tiktoken

        assert self.fingerprint
        return tiktoken.Encoding(
            name="gpt2",
            explicit_n_vocab=GPT2.size,
            pat_str=PATTERN,
            mergeable_ranks=ranks(VOCABULARY_FILE.read_text(encoding="utf-8")),
            special_tokens={END_OF_TEXT: self.eot},
        )

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.encoding.decode_bytes([token for token in ids if token != self.eot])


class ByteTokenizer:
    """The bytes of UTF-8, one id each."""

    eot = BYTES.size - 1
    unit = "byte"
    bytes_per_token = 1
    fingerprint = hashlib.sha256(b"the 256 bytes of UTF-8, then an end of text").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(whole_characters(text).encode())

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(token for token in ids if token != self.eot)


ALL: dict[str, Tokenizer] = {GPT2.name: Gpt2Tokenizer(), BYTES.name: ByteTokenizer()}


def load(name: str) -> Tokenizer:
    """Return the tokenizer that `DataConfig.tokenizer` names."""
    return ALL[name]


def find(fingerprint: str) -> Tokenizer:
    """Return the tokenizer of a record or a corpus. Fingerprints of unknown origin are of GPT-2's."""
    return ALL[BYTES.name if fingerprint == ByteTokenizer.fingerprint else GPT2.name]


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text of the ids, an EOT as END_OF_TEXT. A part of a character becomes U+FFFD."""
    parts: list[list[int]] = [[]]
    for token in ids:
        parts.append([]) if token == tokenizer.eot else parts[-1].append(token)
    return END_OF_TEXT.join(tokenizer.decode_bytes(part).decode(errors="replace") for part in parts)


def describe_marks(tokenizer: Tokenizer, marks: Mapping[str, int]) -> str:
    """Return a sentence about the special marks in a text, mark -> occurrences."""
    listed = [
        f"{mark} {count:,} times ({len(tokenizer.encode(mark))} tokens each)"
        for mark, count in sorted(marks.items(), key=lambda item: -item[1])
    ]
    others = f" and {len(listed) - 5:,} other marks" if len(listed) > 5 else ""
    return (
        f"the text has {', '.join(listed[:5])}{others}: ordinary text, and no end of a document; "
        "fix if it should be one: a .jsonl file with a document a line"
    )


def printable_bytes() -> dict[str, int]:
    """Map GPT-2's printable characters to bytes. A byte without a printable character uses U+0100 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


def ranks(text: str) -> dict[bytes, int]:
    """Map token bytes to ids: the 256 bytes in GPT-2's order, then one id for each merge in vocab.bpe."""
    byte_of = printable_bytes()
    table = {bytes([byte]): rank for rank, byte in enumerate(byte_of.values())}
    for line in text.split("\n")[1:]:
        if line:
            token = bytes(byte_of[character] for part in line.split() for character in part)
            table[token] = len(table)
    return table
