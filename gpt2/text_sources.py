"""Read documents from the embedded text, local files, or a data set of the Hugging Face hub.

Every source yields its documents in a fixed order, so that the corpus is a function of the source.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from referee.numerics.text_files import clean, is_empty, json_lines, read_text, text_parts
from runtime.errors import UserError
from runtime.settings import DataConfig, EvalSet

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
READING = 2  # the rule of referee.numerics.text_files; another number prepares local files again
FEW_FILES = 20  # fewer texts are cut at paragraphs, since a split by whole documents would be too coarse
PIECE_CHARACTERS = 20_000
LONGEST_PIECE = 4 * PIECE_CHARACTERS  # of a text without paragraphs
PROBE_SECONDS = 5.0
STRINGS = re.compile(r"(dictionary<values=)?(large_)?string")  # types of a parquet column
SURROGATE = re.compile("[\ud800-\udfff]")  # a byte of a file name that is not UTF-8
ALTERNATIVES = (
    "fix without a network: CONFIG_DATASET_FILES with local .txt, .md, .jsonl or .parquet files, "
    "or CONFIG_DATASET_EMBEDDED=y"
)


class DataError(UserError, RuntimeError):
    """The corpus cannot be found, read or trusted. The message names the file and the fix."""


@dataclass(frozen=True)
class HubSource:
    """A data set of the hub. column: the name of the text column."""

    path: str
    name: str | None
    column: str = "text"


HUB = {
    "fineweb-edu": HubSource("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "openwebtext": HubSource("Skylion007/openwebtext", None),
    "tinystories": HubSource("roneneldan/TinyStories", None),
    "wikitext103": HubSource("Salesforce/wikitext", "wikitext-103-raw-v1"),
}
VALIDATION_PERMILLE = {"embedded": 50, "files": 50, "wikitext103": 20, "tinystories": 10}  # others: 5


def validation_permille(dataset: str) -> int:
    """Return the share of validation documents in thousandths. Small corpora have a larger one."""
    return VALIDATION_PERMILLE.get(dataset, 5)


def source_identity(config: DataConfig) -> dict[str, Any]:
    """Return the properties that a prepared corpus depends on. A changed source has another identity."""
    if config.dataset == "embedded":
        digest = hashlib.sha256()
        for path in embedded_files():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return {"dataset": "embedded", "python": sys.version.split()[0], "sha256": digest.hexdigest()}
    if config.dataset == "files":
        files = []
        for path in local_files(config.files):
            stat = path.stat()
            files.append([os.fspath(path), stat.st_size, stat.st_mtime_ns])
        return {"dataset": "files", "files": files, "reading": READING}
    source = HUB[config.dataset]
    return {"dataset": config.dataset, "path": source.path, "name": source.name}


def documents(config: DataConfig) -> Iterator[str]:
    """Yield the documents of the source in its order."""
    if config.dataset == "embedded":
        return (path.read_text(encoding="utf-8", errors="replace") for path in embedded_files())
    if config.dataset == "files":
        return _file_documents(local_files(config.files))
    return _hub_documents(config.dataset)


# -- the embedded text ------------------------------------------------------------------------------------------


def embedded_files() -> list[Path]:
    """List the source files of Python's standard library without its tests: about 12 MB of text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(
            f"this Python has no standard library as files in {root}; fix: name files in CONFIG_DATASET_FILES"
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


# -- local files ------------------------------------------------------------------------------------------------


def local_files(
    patterns: tuple[str, ...], symbol: str = "CONFIG_DATASET_FILES", suffixes: tuple[str, ...] = SUFFIXES
) -> list[Path]:
    """List the files that match the globs, sorted. DataError for a glob without files or an unknown suffix.

    A file that several names or links lead to counts once, under its first name.
    symbol: the setting that has the globs, for messages.
    """
    found: set[Path] = set()
    for pattern in patterns:
        files = [path for path in _matches(os.path.expanduser(pattern)) if path.is_file()]
        if not files:
            raise DataError(
                f"{symbol}: {pattern!r} matches no file; fix: use globs such as texts/**/*.txt; "
                "quote a name with spaces: 'my texts/*.txt'"
            )
        found |= set(files)
    for path in found:
        if path.suffix not in suffixes:
            raise DataError(
                f"{symbol}: {os.fspath(path)!r} is of an unknown kind; fix: use {', '.join(suffixes)}"
            )
        if SURROGATE.search(os.fspath(path)):  # the manifest is UTF-8
            raise DataError(f"{symbol}: the name {os.fspath(path)!r} is not UTF-8 text; fix: rename the file")
    names = {path.resolve(): path for path in sorted(found, reverse=True)}  # the first name is entered last
    return sorted(names.values())


def _matches(pattern: str) -> Iterator[Path]:
    """Yield what a glob matches. ** enters every folder once, so that a loop of links ends."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.glob(pattern))
        return
    place = parts.index("**")
    entered: set[str] = set()
    for base in sorted(glob.glob(os.path.join(*parts[:place])) if place else ["."]):
        for folder, folders, _ in os.walk(base, followlinks=True):
            if os.path.realpath(folder) in entered:
                folders.clear()
                continue
            entered.add(os.path.realpath(folder))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from _matches(os.path.join(glob.escape(folder), *(parts[place + 1 :] or "*")))


def check_eval_files(sets: Sequence[EvalSet]) -> None:
    """Raise DataError for a set whose files do not exist, are of an unknown kind, or are all empty."""
    for one in sets:
        if one.pattern:
            eval_files(one)


def eval_files(one: EvalSet) -> list[Path]:
    """Return the files of a set of CONFIG_EVAL_SETS, sorted. DataError as in `check_eval_files`."""
    where = f"CONFIG_EVAL_SETS: {one.name}"
    files = local_files((one.pattern,), where, (*SUFFIXES, ".raw", ".tokens"))
    if all(map(is_empty, files)):
        raise DataError(
            f"{where}: {os.fspath(files[0])!r} is empty; fix: name a file with text, or leave the set out"
        )
    return files


def report_empty_files(config: DataConfig, report: Callable[[str], None]) -> None:
    """Report the empty local files. DataError where all are empty."""
    files = local_files(config.files) if config.dataset == "files" else []
    empty = [repr(os.fspath(path)) for path in files if is_empty(path)]
    if not empty:
        return
    names = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
    if len(empty) == len(files):
        raise DataError(f"CONFIG_DATASET_FILES: every file is empty: {names}; fix: name files with text")
    report(f"data: empty, adds no text: {names}")


def _file_documents(files: list[Path]) -> Iterator[str]:
    few = len(files) < FEW_FILES and all(path.suffix in (".txt", ".md") for path in files)
    for path in files:
        if few:
            yield from split_at_paragraphs(text_parts(path))
        else:
            yield from read_documents(path)


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file: the rows of .jsonl and .parquet; any other file is one document."""
    if path.suffix == ".jsonl":
        yield from _jsonl_documents(path)
    elif path.suffix == ".parquet":
        yield from _parquet_documents(path)
    else:
        yield read_text(path)


def split_at_paragraphs(parts: Iterable[str]) -> Iterator[str]:
    """Cut a text at paragraph ends into pieces of about PIECE_CHARACTERS. Joined they equal the joined parts."""
    rest = ""
    for part in parts:
        start, rest = 0, rest + part
        while len(rest) - start > LONGEST_PIECE:  # the end of the piece does not depend on later parts
            end = _piece_end(rest, start)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    while rest:
        end = _piece_end(rest, 0)
        yield rest[:end]
        rest = rest[end:]


def _piece_end(text: str, start: int) -> int:
    """Return the end of the first paragraph after PIECE_CHARACTERS, else of a line, else of the longest piece."""
    longest = start + LONGEST_PIECE
    end = text.find("\n\n", start + PIECE_CHARACTERS, longest)
    if end >= 0:
        return end + 2
    if len(text) <= longest:
        return len(text)
    return text.find("\n", start + PIECE_CHARACTERS, longest) + 1 or longest


def _jsonl_documents(path: Path) -> Iterator[str]:
    for where, value in json_lines(path):
        text = value.get("text", value.get("content")) if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise DataError(
                f'{where} is not a JSON object with a "text" or "content" string; fix: correct or remove the line'
            )
        yield text


def _parquet_documents(path: Path) -> Iterator[str]:
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(
            f"{os.fspath(path)!r} needs pyarrow, which this Python lacks; fix: install it, or run make without PYTHON="
        )
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        kinds = {field.name: str(field.type) for field in file.schema_arrow}
        columns = [name for name in ("text", "content") if STRINGS.match(kinds.get(name, ""))]
        for batch in file.iter_batches(batch_size=1000, columns=columns[:1]) if columns else ():
            yield from (clean(text) for text in batch.column(0).to_pylist() if text)
    except Exception as error:  # pyarrow raises several kinds for a damaged file
        raise DataError(
            f"{os.fspath(path)!r} is not a parquet file, or damaged: {error}; fix: replace it, or leave it out"
        ) from error
    if not columns:
        raise DataError(
            f"{os.fspath(path)!r} has the columns {kinds}; fix: name the column of strings text or content"
        )


# -- the hub ----------------------------------------------------------------------------------------------------


def _hub_documents(dataset: str) -> Iterator[str]:
    source = HUB[dataset]
    rows = open_hub(source)
    texts = (row[source.column] for row in rows)
    return group_articles(texts) if dataset == "wikitext103" else texts


def open_hub(source: HubSource, split: str = "train", alternatives: str = ALTERNATIVES) -> Any:
    """Open the data set as a stream. DataError within seconds where the hub cannot be reached.

    alternatives: the fix without a network.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{source.path} needs the package datasets, which this Python lacks; fix: install it, or run make without "
            f"PYTHON=; {alternatives}"
        )
    probe_hub(source.path, alternatives)
    for variable in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        os.environ.setdefault(variable, "20")
    import datasets

    try:
        return datasets.load_dataset(source.path, source.name, split=split, streaming=True)
    except Exception as error:  # the hub's client raises many kinds
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{source.path} cannot be loaded from the hub ({first}); {alternatives}") from error


def probe_hub(path: str, alternatives: str = ALTERNATIVES) -> None:
    """Raise DataError in seconds where the hub is unreachable; its client retries for minutes. Skipped with a proxy."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = url.port or (80 if url.scheme == "http" else 443)
    try:
        socket.create_connection((url.hostname or "", port), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise DataError(
            f"{path}: the hub at {url.hostname} cannot be reached ({error}); {alternatives}"
        ) from None


def group_articles(lines: Iterator[str]) -> Iterator[str]:
    """Group WikiText's lines into articles. An article begins at a first-level heading: ` = Title = `."""
    article: list[str] = []
    for line in lines:
        if re.fullmatch(r" = [^=].* = \n?", line) and article:
            yield "".join(article)
            article = []
        article.append(line)
    if article:
        yield "".join(article)
