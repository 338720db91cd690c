"""Turn documents into shards: batch the texts, tokenize them in parallel, write and hash the files."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from gpt2 import tokenizer
from gpt2.text_sources import DataError
from referee.numerics.text_files import whole_characters
from runtime import records
from runtime.files import DamagedFileError
from runtime.records import Count, Text
from runtime.signals import end_with_parent

FILE = re.compile(r"(train|validation)-\d+\.bin|manifest\.json")
REBUILD = "fix: make data (it checks the corpus and rebuilds it)"


@dataclass(frozen=True)
class Shard:
    """A file of uint16 tokens. file: its name in the corpus's folder."""

    file: Text
    tokens: Count
    sha256: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+\.bin", self.file, re.ASCII):  # no path
            raise ValueError(f"a shard has the name {self.file!r}")


@dataclass(frozen=True)
class Split:
    """The shards of the training or the validation text. tokens: their sum."""

    tokens: Count
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.tokens != sum(shard.tokens for shard in self.shards):
            raise ValueError(f"a split has {self.tokens} tokens, its shards have another number")


@dataclass(frozen=True)
class Manifest:
    """The content of a prepared corpus. source: the identity of its text; end_of_text: token id.

    marks: how often the text has letters such as <|endoftext|>, which are ordinary tokens.
    """

    source: Mapping[str, Any]
    tokenizer: str
    documents: Count
    end_of_text: Count
    splits: Mapping[str, Split]  # "train" and "validation"
    split_rule: str
    marks: Mapping[str, Count] = field(default_factory=dict)
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        if set(self.splits) != {"train", "validation"}:
            raise ValueError(f"its splits are {sorted(self.splits)}")
        if type(self.source.get("validation_permille")) is not int or "dataset" not in self.source:
            raise ValueError("its source has no dataset or no validation_permille")

    def write(self, directory: Path) -> None:
        """Write manifest.json and flush it to the disk."""
        records.write(directory / "manifest.json", dataclasses.asdict(self))


def written_files(directory: Path) -> list[str]:
    """Return the names of the shards and the manifest in the folder of a corpus, which may be unfinished."""
    return sorted(path.name for path in directory.glob("*") if FILE.fullmatch(path.name))


def read_manifest(directory: Path) -> Manifest:
    """Read manifest.json. DataError where it is missing or damaged."""
    path = directory / "manifest.json"
    try:
        return records.read(Manifest, path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {REBUILD}") from error
    except DamagedFileError as error:
        raise DataError(f"{error}; {REBUILD}") from error


SHARD_TOKENS = 100_000_000  # 200 MB a shard
BATCH_CHARACTERS = 1_000_000  # of text in one worker task
SMALL_CHARACTERS = 4_000_000  # shorter texts are tokenized faster without a process pool
SHORTEST_TOKENS = 17  # 16 inputs and one more target: the smallest block size
TAIL_TOKENS = 1025  # 1024 inputs and one more target: GPT-2's block size


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Group documents into lists of about BATCH_CHARACTERS."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


Encoded = tuple[bytes, bytes, int, Counter[str]]  # training and validation tokens, documents, special marks


def encode(texts: list[str], permille: int, name: str) -> Encoded:
    """Tokenize documents, an EOT after each, into little-endian uint16 bytes of each split. name: of the tokenizer."""
    encoding = tokenizer.load(name)
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    marks: Counter[str] = Counter()
    for text in texts:
        digest = hashlib.sha256(whole_characters(text).encode()).digest()
        to_validation = int.from_bytes(digest[:8], "big") % 1000 < permille
        marks.update(tokenizer.MARK.findall(text))
        tokens = encoding.encode(text)
        tokens.append(encoding.eot)
        splits[to_validation].append(np.array(tokens, dtype="<u2").tobytes())
    return b"".join(splits[0]), b"".join(splits[1]), len(texts), marks


def encode_batches(batches: Iterator[list[str]], permille: int, name: str, workers: int) -> Iterator[Encoded]:
    """Encode the batches in order. Uses a process pool for long texts, with at most 2 x workers batches queued."""
    first: list[list[str]] = []
    for batch in batches:
        first.append(batch)
        if sum(len(text) for part in first for text in part) >= SMALL_CHARACTERS:
            break
    else:
        workers = 1
    if workers == 1:
        for batch in first:
            yield encode(batch, permille, name)
        for batch in batches:
            yield encode(batch, permille, name)
        return
    context = multiprocessing.get_context("spawn")  # forking a process that has threads can hang
    ending = (signal.SIGKILL, os.getpid())
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=end_with_parent, initargs=ending
    ) as pool:
        ahead: list[Future[Encoded]] = [pool.submit(encode, batch, permille, name) for batch in first]
        try:
            for batch in batches:
                ahead.append(pool.submit(encode, batch, permille, name))
                if len(ahead) > 2 * workers:
                    yield ahead.pop(0).result()
            while ahead:
                yield ahead.pop(0).result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class ShardWriter:
    """Write the tokens of one split into shards of SHARD_TOKENS; hash them and flush them to the disk."""

    def __init__(self, directory: Path, split: str) -> None:
        self._directory, self._split = directory, split
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._written = 0
        self.tokens = 0

    def write(self, data: bytes) -> None:
        while data:
            if self._file is None:
                name = f"{self._split}-{len(self._shards):03d}.bin"
                self._file, self._digest, self._written = (
                    (self._directory / name).open("wb"),
                    hashlib.sha256(),
                    0,
                )
            part = data[: 2 * (SHARD_TOKENS - self._written)]
            self._file.write(part)
            self._digest.update(part)
            self._written += len(part) // 2
            self.tokens += len(part) // 2
            data = data[len(part) :]
            if self._written == SHARD_TOKENS:
                self._end_shard()

    def _end_shard(self) -> None:
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            name = Path(self._file.name).name
            self._shards.append(Shard(name, self._written, self._digest.hexdigest()))
            self._file = None

    def close(self) -> Split:
        self._end_shard()
        return Split(self.tokens, tuple(self._shards))


def split_tail(directory: Path, splits: dict[str, Split], permille: int) -> tuple[dict[str, Split], str]:
    """Replace the shards by a split that takes the last tokens for validation. Returns the splits and the rule.

    The share is `permille`. If that is shorter than one sequence of GPT-2's block size, it is up to a fifth.
    Raises DataError if the text is too short for both parts.
    """
    files = [directory / shard.file for split in splits.values() for shard in split.shards]
    data = b"".join(file.read_bytes() for file in files)
    total = len(data) // 2
    count = max(total * permille // 1000, min(total // 5, TAIL_TOKENS))
    if count < SHORTEST_TOKENS:
        raise DataError(
            f"the text has {total} tokens, and training and validation need {5 * SHORTEST_TOKENS} or more; fix: use at "
            "least 5 x (CONFIG_GPT2_BLOCK_SIZE + 1) tokens: 645 for a block size of 128, 5,125 for 1024"
        )
    for file in files:
        file.unlink()
    parts = {"train": data[: 2 * (total - count)], "validation": data[2 * (total - count) :]}
    done = {}
    for split, part in parts.items():
        writer = ShardWriter(directory, split)
        writer.write(part)
        done[split] = writer.close()
    return done, f"the last {count:,} of {total:,} tokens to validation"
