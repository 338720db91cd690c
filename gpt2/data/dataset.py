"""A corpus as GPT-2 tokens: prepared once, verified, and read as batches that are a pure function of (data, seed, k).

    <DATA_DIR>/<dataset>-<key>/train-000.bin ...        uint16 tokens, an EOT after each document
                               validation-000.bin ...
                               manifest.json            source, tokens, documents, tokenizer, SHA-256 of every shard

A document belongs to validation when the hash of its text says so, wherever it stands in the source.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.config.config import DataConfig
from gpt2.data import tokenizer
from gpt2.data.progress import Report, TokenMeter, format_rate
from gpt2.data.shards import ShardWriter, batches, encoded
from gpt2.data.sources import DataError, document_count, documents, source_identity, validation_permille
from gpt2.system.files import write_json

__all__ = [
    "Corpus",
    "DataError",
    "TokenStream",
    "check",
    "global_batch",
    "open_corpus",
    "prepare",
    "validation_windows",
    "verify",
    "window_numbers",
]

SPLITS = ("train", "validation")
REBUILD = "run `make data`, which checks the corpus and rebuilds it"


# -- reading ----------------------------------------------------------------------------------------------------


class TokenStream:
    """Several memory-mapped shards as one stream of uint16 tokens."""

    def __init__(self, shards: Sequence[np.ndarray]) -> None:
        self._shards = [shard for shard in shards if len(shard)]
        self._ends = np.cumsum([len(shard) for shard in self._shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._shards else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start+length-1, across shards."""
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
        """Window w is tokens w*T .. w*T+T: (n, T+1) uint16; its last token is the next window's first."""
        out = np.empty((len(numbers), block_size + 1), dtype=np.uint16)
        for row, number in enumerate(numbers):
            out[row] = self.read(int(number) * block_size, block_size + 1)
        return out


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, memory-mapped. fingerprint: over what the shards hold, wherever they lie."""

    train: TokenStream
    validation: TokenStream
    manifest: dict[str, Any]
    fingerprint: str


@functools.lru_cache(maxsize=2)
def _order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch's windows: a permutation keyed by (seed, epoch) alone."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    return generator.permutation(windows)


def global_batch(
    train: TokenStream, block_size: int, effective: int, seed: int, iteration: int
) -> np.ndarray:
    """The (effective, block_size + 1) uint16 sequences of an iteration, a pure function of its arguments."""
    return train.windows(window_numbers(len(train), block_size, effective, seed, iteration), block_size)


def window_numbers(tokens: int, block_size: int, effective: int, seed: int, iteration: int) -> list[int]:
    """Which windows of a text of so many tokens make the batch of an iteration.

    Non-overlapping windows, each once an epoch, shuffled anew each epoch; a batch may reach into the next epoch.
    DataError where the corpus is shorter than one window.
    """
    windows = (tokens - 1) // block_size
    if windows < 1:
        raise DataError(
            f"the training text has {tokens} tokens, less than one sequence of "
            f"CONFIG_GPT2_BLOCK_SIZE={block_size}; right: more text, or a smaller block size"
        )
    first = iteration * effective
    numbers: list[int] = []
    while len(numbers) < effective:
        epoch, start = divmod(first + len(numbers), windows)
        numbers += _order(windows, seed, epoch)[start : start + effective - len(numbers)].tolist()
    return numbers


def validation_windows(validation: TokenStream, block_size: int, tokens: int) -> np.ndarray:
    """The first windows of the validation text, (n, block_size + 1) uint16: `tokens` of them, or all there are."""
    count = min(tokens // block_size, (len(validation) - 1) // block_size)
    if count < 1:
        raise DataError(
            f"the validation text has {len(validation)} tokens, less than one sequence of "
            f"CONFIG_GPT2_BLOCK_SIZE={block_size}; right: more documents, or a smaller block size"
        )
    return validation.windows(range(count), block_size)


def verify(directory: Path, full: bool = False) -> dict[str, Any]:
    """The manifest, after checking every shard's size (and, with `full`, its SHA-256); DataError names the shard."""
    path = directory / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        shards = [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]]
        expected = [
            (directory / shard["file"], int(shard["tokens"]), str(shard["sha256"])) for shard in shards
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); {REBUILD}") from error
    for shard, tokens, sha256 in expected:
        size = shard.stat().st_size if shard.is_file() else -1
        if size != 2 * tokens:
            seen = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(f"data shard {shard} {seen}; the manifest says {2 * tokens}; {REBUILD}")
        if full and _sha256(shard) != sha256:
            raise DataError(f"data shard {shard} was altered: its SHA-256 is not the manifest's; {REBUILD}")
    return manifest


def check(directory: Path, report: Report) -> None:
    """Every shard's content against the manifest, once for each state of the files; DataError names the shard.

    What was found whole is noted in verified.json by size and time of change, so that the next start is quick.
    """
    manifest = verify(directory)
    files = [shard["file"] for split in SPLITS for shard in manifest["splits"][split]["shards"]]
    stats = {name: (directory / name).stat() for name in files}
    state = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
    noted = directory / "verified.json"
    try:
        if json.loads(noted.read_text()) == state:
            return
    except (OSError, ValueError):
        pass
    if sum(stat.st_size for stat in stats.values()) > 2**30:
        report("data: checking the content of the shards")
    verify(directory, full=True)
    with contextlib.suppress(OSError):  # a folder that is shared read-only is checked at every start
        write_json(noted, state)


def open_corpus(directory: Path) -> Corpus:
    """Memory-map a prepared corpus; DataError where a shard is not as the manifest says."""
    manifest = verify(directory)
    streams = []
    for split in SPLITS:
        shards = manifest["splits"][split]["shards"]
        streams.append(TokenStream([np.memmap(directory / s["file"], dtype="<u2", mode="r") for s in shards]))
    content = [
        manifest["tokenizer"],
        [[s["sha256"] for s in manifest["splits"][split]["shards"]] for split in SPLITS],
    ]
    fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return Corpus(streams[0], streams[1], manifest, fingerprint)


# -- preparing --------------------------------------------------------------------------------------------------


def corpus_directory(config: DataConfig) -> tuple[Path, dict[str, Any]]:
    """Where the corpus of this configuration lies, and the identity that the place is named by."""
    identity = source_identity(config) | {
        "max_tokens": config.max_tokens,
        "tokenizer": tokenizer.fingerprint(),
        "validation_permille": validation_permille(config.dataset),
        "version": 1,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    return config.directory / f"{config.dataset}-{key}", identity


def prepare(config: DataConfig, report: Report, rebuild: bool = False) -> Path:
    """The prepared corpus's directory, made now if it is not there; one process makes it, others wait.

    With `rebuild` every shard's content is checked first, and a damaged corpus is made again.
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
        lock = (config.directory / f".{directory.name}.lock").open("w")
    except OSError as error:
        raise DataError(
            f"{config.directory} cannot be written: {error.strerror}; see CONFIG_DATA_DIR"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # dropped by the system with its process
        if rebuild or not directory.is_dir():
            _make(config, directory, identity, report)
    return directory


def _make(config: DataConfig, directory: Path, identity: dict[str, Any], report: Report) -> None:
    """Tokenise into a temporary directory, then rename; a run that was cut off leaves nothing but that directory."""
    for leftover in config.directory.glob(f".{directory.name}.*.tmp"):
        shutil.rmtree(leftover)
    temporary = config.directory / f".{directory.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        report(f"data: preparing {config.dataset} in {directory}")
        writers = {split: ShardWriter(temporary, split) for split in SPLITS}
        count = _write_all(config, writers, report)
        splits = {split: writer.close() for split, writer in writers.items()}
        for split in SPLITS:
            if not splits[split]["tokens"]:
                raise DataError(
                    f"no document of {config.dataset} fell to {split} ({count} documents in all); right: more "
                    "documents (one a file, or one a line of a .jsonl)"
                )
        manifest = {
            "schema": 1, "source": identity, "tokenizer": identity["tokenizer"], "documents": count,
            "end_of_text": tokenizer.EOT, "splits": splits,
            "split_rule": f"SHA-256 of the text, {identity['validation_permille']} of 1000 to validation",
        }  # fmt: skip
        with (temporary / "manifest.json").open("w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if directory.exists():
            shutil.rmtree(directory)
        temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_all(config: DataConfig, writers: dict[str, ShardWriter], report: Report) -> int:
    """Every document through the tokenizer into its split, in the source's order. Returns how many there were."""
    count = total = 0
    permille, workers = validation_permille(config.dataset), config.workers or len(os.sched_getaffinity(0))
    expected = document_count(config)
    with TokenMeter("data", report) as meter:
        for part in encoded(batches(documents(config)), permille, workers):
            for split, tokens in zip(SPLITS, part[:2], strict=True):
                writers[split].write(tokens)
            count += part[2]
            total = sum(writer.tokens for writer in writers.values())
            meter.update(total, _share(total, config.max_tokens, count, expected))
            if config.max_tokens and total >= config.max_tokens:
                break
        seconds = meter.seconds
    report(f"data: {format_rate(total, seconds, f' of {count} documents')}")
    return count


def _share(tokens: int, most: int, count: int, expected: int | None) -> float | None:
    """How much of the work is done: it ends at `most` tokens (0: no limit) or when the documents do."""
    shares = [tokens / most] if most else []
    shares += [count / expected] if expected else []
    return max(shares, default=None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
