"""Small corpora for tests: files of short documents, their configuration, the prepared corpus."""

from collections.abc import Callable
from pathlib import Path

from gpt2 import dataset
from gpt2.dataset import Corpus
from runtime.settings import DataConfig


def source(
    directory: Path, *files: str | Path, kind: str = "files", max_tokens: int = 0, workers: int = 1
) -> DataConfig:
    """Return the configuration of a corpus that is prepared in a directory."""
    return DataConfig(kind, tuple(str(path) for path in files), max_tokens, directory, workers)


def write_documents(folder: Path, count: int = 60) -> str:
    """Write that many short documents and return the glob of their files."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number:03d}.txt").write_text(
            f"Document {number}. " + "All work and some play. " * (number % 7)
        )
    return str(folder / "*.txt")


def ignore(text: str) -> None:
    """Drop a message."""


def prepared(config: DataConfig, report: Callable[[str], None] = ignore) -> Corpus:
    return dataset.open_corpus(dataset.prepare(config, report))
