"""From documents to shards: texts in batches, tokens by a pool of processes, files with their hashes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt2.data import tokenizer
from gpt2.system.signals import end_with_parent

SHARD_TOKENS = 100_000_000  # 200 MB a shard
BATCH_CHARACTERS = 1_000_000  # of text handed to a worker at once
SMALL_CHARACTERS = 4_000_000  # below this a process pool costs more than it saves


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Documents in lists of about BATCH_CHARACTERS."""
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


Encoded = tuple[bytes, bytes, int]  # training tokens, validation tokens, documents


def encode(texts: list[str], permille: int) -> Encoded:
    """Tokens of each document and an EOT after it, as little-endian uint16 bytes by split."""
    encoding = tokenizer.load()
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    for text in texts:
        raw = text.encode("utf-8", errors="replace")
        digest = hashlib.sha256(raw).digest()
        to_validation = int.from_bytes(digest[:8], "big") % 1000 < permille
        tokens = encoding.encode_ordinary(raw.decode("utf-8"))
        tokens.append(tokenizer.EOT)
        splits[to_validation].append(np.array(tokens, dtype="<u2").tobytes())
    return b"".join(splits[0]), b"".join(splits[1]), len(texts)


def encoded(batches: Iterator[list[str]], permille: int, workers: int) -> Iterator[Encoded]:
    """The encoded batches in order; by a process pool once there is enough text, a few batches ahead at most."""
    held: list[list[str]] = []
    for batch in batches:
        held.append(batch)
        if sum(len(text) for part in held for text in part) >= SMALL_CHARACTERS:
            break
    else:
        workers = 1
    if workers == 1:
        for batch in held:
            yield encode(batch, permille)
        for batch in batches:
            yield encode(batch, permille)
        return
    context = multiprocessing.get_context("spawn")  # forking a process that has threads can hang
    with ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent) as pool:
        ahead: list[Future[Encoded]] = [pool.submit(encode, batch, permille) for batch in held]
        try:
            for batch in batches:
                ahead.append(pool.submit(encode, batch, permille))
                if len(ahead) > 2 * workers:
                    yield ahead.pop(0).result()
            while ahead:
                yield ahead.pop(0).result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class ShardWriter:
    """Tokens of one split into shards of SHARD_TOKENS, hashed as they are written and flushed to the disk."""

    def __init__(self, directory: Path, split: str) -> None:
        self._directory, self._split = directory, split
        self._shards: list[dict[str, Any]] = []
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
            self._shards.append({"file": name, "tokens": self._written, "sha256": self._digest.hexdigest()})
            self._file = None

    def close(self) -> dict[str, Any]:
        self._end_shard()
        return {"tokens": self.tokens, "shards": self._shards}
