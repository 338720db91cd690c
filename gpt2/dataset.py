"""Prepare a corpus as tokens, verify it, and read its batches.

    <DATA_DIR>/<dataset>-<key>/train-000.bin ...        uint16 tokens, an EOT after each document
                               validation-000.bin ...
                               manifest.json            source, tokens, documents, tokenizer, SHA-256 of every shard

The hash of a document's text assigns it to training or validation. Where that leaves either part empty, the last
tokens of the corpus are the validation text. A batch is a pure function of (data, seed, iteration).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2 import tokenizer as tokenizers
from gpt2.shards import (
    REBUILD,
    SHORTEST_TOKENS,
    Manifest,
    ShardWriter,
    batches,
    encode_batches,
    read_manifest,
    split_tail,
    written_files,
)
from gpt2.text_sources import DataError, documents, report_empty_files, source_identity, validation_permille
from referee.pages.markup import counted
from runtime import records
from runtime.detected_hardware import allowed_cpus
from runtime.files import open_append, quarantine, remove_files
from runtime.output import LiveLine, Report, duration
from runtime.settings import DataConfig

SPLITS = ("train", "validation")
PLAIN_SECONDS = 5.0  # between plain lines of progress


# -- reading ----------------------------------------------------------------------------------------------------


class TokenStream:
    """Read several memory-mapped shards as one stream of uint16 tokens."""

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self._shards = [shard for shard in shards if len(shard)]
        self._ends = np.cumsum([len(shard) for shard in self._shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._shards else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens start .. start+length-1, across shards."""
        parts = []
        while length > 0:
            index = int(np.searchsorted(self._ends, start, side="right"))
            shard = self._shards[index]
            offset = start - (int(self._ends[index]) - len(shard))
            part = shard[offset : offset + length]
            parts.append(part)
            start, length = start + len(part), length - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def windows(self, numbers: Sequence[int] | np.ndarray, block_size: int) -> np.ndarray:
        """Return windows as (n, T+1) uint16. Window w is tokens w*T .. w*T+T; its last token begins the next one."""
        out = np.empty((len(numbers), block_size + 1), dtype=np.uint16)
        for row, number in enumerate(numbers):
            out[row] = self.read(int(number) * block_size, block_size + 1)
        return out


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, memory-mapped. fingerprint: hash of the shards' content; independent of the folder."""

    train: TokenStream
    validation: TokenStream
    manifest: Manifest
    fingerprint: str


@functools.lru_cache(maxsize=2)
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch's windows, a permutation keyed by (seed, epoch)."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    return generator.permutation(windows)


def global_batch(
    train: TokenStream, block_size: int, effective: int, seed: int, iteration: int
) -> np.ndarray:
    """Return the sequences of an iteration, (effective, block_size + 1) uint16."""
    return train.windows(window_numbers(len(train), block_size, effective, seed, iteration), block_size)


def window_numbers(tokens: int, block_size: int, effective: int, seed: int, iteration: int) -> list[int]:
    """Return the numbers of the windows in the batch of an iteration.

    Windows do not overlap. Each occurs once an epoch, in a new order each epoch. A batch may span two epochs.
    Raises DataError where the training text is shorter than one window.
    """
    windows = (tokens - 1) // block_size
    if windows < 1:
        raise DataError(
            f"the training text has {tokens} tokens, less than one sequence of "
            f"CONFIG_GPT2_BLOCK_SIZE={block_size}; fix: use more text or a smaller block size"
        )
    first = iteration * effective
    numbers: list[int] = []
    while len(numbers) < effective:
        epoch, start = divmod(first + len(numbers), windows)
        numbers += _order(windows, seed, epoch)[start : start + effective - len(numbers)].tolist()
    return numbers


def validation_windows(validation: TokenStream, block_size: int, tokens: int) -> np.ndarray:
    """Return the first windows of the validation text, (n, block_size + 1) uint16: `tokens` tokens at most."""
    count = min(tokens // block_size, (len(validation) - 1) // block_size)
    if count < 1:
        raise DataError(
            f"the validation text has {len(validation)} tokens, less than one sequence of "
            f"CONFIG_GPT2_BLOCK_SIZE={block_size}; fix: use more text or a smaller block size"
        )
    return validation.windows(range(count), block_size)


def verify(directory: Path, full: bool = False) -> Manifest:
    """Check every shard's size (with `full` its SHA-256 as well) and return the manifest. DataError names the shard."""
    manifest = read_manifest(directory)
    for shard in (shard for split in SPLITS for shard in manifest.splits[split].shards):
        path = directory / shard.file
        size = path.stat().st_size if path.is_file() else -1
        if size != 2 * shard.tokens:
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(f"data shard {path} {found}; the manifest says {2 * shard.tokens}; {REBUILD}")
        if full and records.digest(path) != shard.sha256:
            raise DataError(f"data shard {path} was altered: its SHA-256 is not the manifest's; {REBUILD}")
    return manifest


def check_length(manifest: Manifest, block_size: int) -> None:
    """Raise DataError where the training or the validation text is shorter than one sequence."""
    tokens = {split: manifest.splits[split].tokens for split in SPLITS}
    if min(tokens.values()) > block_size:
        return
    source = manifest.source
    enough = 2 * (block_size + 1) * 1000 // int(source["validation_permille"])  # twice the expected need
    kilobytes = -(-enough * tokenizers.find(manifest.tokenizer).bytes_per_token // 1000)
    symbol = "DATASET_FILES" if source["dataset"] == "files" else "DATASET_MAX_TOKENS"
    raise DataError(
        f"the corpus has {tokens['train']:,} training and {tokens['validation']:,} validation tokens; one sequence of "
        f"CONFIG_GPT2_BLOCK_SIZE={block_size} needs {block_size + 1:,} of each; fix: use at least {enough:,} tokens "
        f"of text, about {kilobytes:,} kB (CONFIG_{symbol}), or a smaller block size"
    )


def check_corpus(directory: Path, block_size: int, report: Report) -> None:
    """Check the corpus's length and the SHA-256 of every shard. DataError names the shard.

    Every start of a study reads all shards: a disk can alter bytes and leave the file's size and times unchanged.
    """
    manifest = verify(directory)
    check_length(manifest, block_size)
    if sum(split.tokens for split in manifest.splits.values()) > 2**29:  # 1 GiB
        report("data: checking the content of the shards")
    verify(directory, full=True)


def open_corpus(directory: Path) -> Corpus:
    """Memory-map a prepared corpus. DataError names a shard that differs from the manifest."""
    manifest = verify(directory)
    streams = []
    for split in SPLITS:
        shards = manifest.splits[split].shards
        streams.append(TokenStream([np.memmap(directory / s.file, dtype="<u2", mode="r") for s in shards]))
    content = [
        manifest.tokenizer,
        [[shard.sha256 for shard in manifest.splits[split].shards] for split in SPLITS],
    ]
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return Corpus(streams[0], streams[1], manifest, fingerprint)


# -- preparing --------------------------------------------------------------------------------------------------


def corpus_directory(config: DataConfig) -> tuple[Path, dict[str, Any]]:
    """Return the folder of this configuration's corpus, and the identity that the folder's name hashes."""
    identity = source_identity(config) | {
        "max_tokens": config.max_tokens,
        "tokenizer": tokenizers.load(config.tokenizer).fingerprint,
        "validation_permille": validation_permille(config.dataset),
        "version": 1,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return config.directory / f"{config.dataset}-{key}", identity


def prepare(config: DataConfig, report: Report, rebuild: bool = False) -> Path:
    """Prepare the corpus where it is missing and return its folder. One process prepares; others wait.

    With `rebuild`, check every shard's content first and prepare a damaged corpus again.
    """
    directory, identity = corpus_directory(config)
    if directory.is_dir():
        if not rebuild:
            return directory
        try:
            verify(directory, full=True)
            return directory
        except DataError as error:
            report(f"data: {error}")
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
        lock = open_append(config.directory / f".{directory.name}.lock")
    except OSError as error:
        raise DataError(
            f"{config.directory} cannot be written: {error.strerror}; fix: name another folder in CONFIG_DATA_DIR"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends
        if rebuild or not directory.is_dir():
            _build(config, directory, identity, report)
    return directory


def _build(config: DataConfig, directory: Path, identity: dict[str, Any], report: Report) -> None:
    """Tokenise into a temporary directory, then rename it. An interrupted build leaves the temporary one only."""
    for leftover in config.directory.glob(f".{directory.name}.*.tmp"):
        remove_files(leftover, written_files(leftover))
    temporary = config.directory / f".{directory.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        report(f"data: preparing {config.dataset} in {directory}")
        report_empty_files(config, report)
        writers = {split: ShardWriter(temporary, split) for split in SPLITS}
        count, marks = _write_all(config, writers, report)
        splits = {split: writer.close() for split, writer in writers.items()}
        permille = identity["validation_permille"]
        rule = f"SHA-256 of the text, {permille} of 1000 to validation"
        if min(split.tokens for split in splits.values()) < SHORTEST_TOKENS:
            splits, rule = split_tail(temporary, splits, permille)
            report(f"data: {count} documents are too few to split by hash: {rule}")
        eot = tokenizers.load(config.tokenizer).eot
        Manifest(identity, identity["tokenizer"], count, eot, splits, rule, dict(marks)).write(temporary)
        if directory.exists():
            report(f"data: the damaged corpus is moved to {quarantine(directory)}")
        temporary.rename(directory)
    finally:
        remove_files(temporary, written_files(temporary))


def _write_all(
    config: DataConfig, writers: dict[str, ShardWriter], report: Report
) -> tuple[int, Counter[str]]:
    """Tokenize every document into its split, in the source's order. Returns the number of documents and the marks."""
    count = total = 0
    marks: Counter[str] = Counter()
    permille, workers = validation_permille(config.dataset), config.workers or len(allowed_cpus())
    began = time.monotonic()
    with LiveLine(PLAIN_SECONDS, report) as line:
        for part in encode_batches(batches(documents(config)), permille, config.tokenizer, workers):
            for split, tokens in zip(SPLITS, part[:2], strict=True):
                writers[split].write(tokens)
            count += part[2]
            marks += part[3]
            total = sum(writer.tokens for writer in writers.values())
            seconds = time.monotonic() - began
            share = min(1.0, total / config.max_tokens) if config.max_tokens else None
            done = f"  {share:.0%}  {duration(seconds / share - seconds)} left" if share else ""
            line.update(f"data: {format_rate(total, seconds)}{done}", share)
            if config.max_tokens and total >= config.max_tokens:
                break
    report(f"data: {format_rate(total, time.monotonic() - began, ' of ' + counted(count, 'document'))}")
    return count, marks


def format_rate(tokens: int, seconds: float, of: str = "") -> str:
    """Return "1.5M tokens, 0.30M tokens/s". of: text after "tokens"."""
    count = f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens:,}"
    return f"{count} tokens{of}, {tokens / max(seconds, 1e-9) / 1e6:.2f}M tokens/s"
