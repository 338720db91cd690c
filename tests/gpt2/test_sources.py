"""Test the sources of text: local files, the hub, the embedded text."""

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import shards
from gpt2 import text_sources as sources
from gpt2.dataset import prepare
from gpt2.text_sources import DataError
from runtime.errors import UserError
from tests.gpt2.corpora import ignore, prepared, source


def test_documents_are_read_from_markdown_jsonl_and_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "a.md").write_text("# one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"content": "three"}\n')
    parquet.write_table(pyarrow.table({"text": ["four", "five"]}), tmp_path / "c.parquet")
    names = tuple(str(tmp_path / name) for name in ("*.md", "b.jsonl", "**/*.parquet"))
    assert list(sources.documents(source(tmp_path, *names))) == ["# one", "two", "three", "four", "five"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", "unknown kind"),
        ("a.txt", b"caf\xe9", "not UTF-8 text at byte 3"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": 3}\n', r"jsonl:2 is not a JSON object"),
        ("a.jsonl", b"nonsense\n", r"jsonl:1 is not JSON"),
        ("a.parquet", b"nonsense", "not a parquet file"),
    ],
)
def test_an_unreadable_file_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        list(sources.documents(source(tmp_path, tmp_path / name)))
    assert name in str(caught.value)


def test_a_damaged_page_of_a_parquet_file_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path, texts = tmp_path / "a.parquet", [f"the dog {number} ran" for number in range(2000)]
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="snappy")
    content = bytearray(path.read_bytes())
    for place in range(200, len(content) // 2, 97):
        content[place] ^= 0x5A
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet.*damaged.*; fix: replace it"):
        list(sources.documents(source(tmp_path, path)))


def test_a_file_name_that_is_not_utf_8_is_an_error_before_the_corpus_is_written(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    with pytest.raises(DataError, match=r"not UTF-8 text; fix: rename the file"):
        prepare(source(tmp_path / "data", tmp_path / "*.txt"), ignore)
    assert not (tmp_path / "data").exists()


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["word " * 900, "\n", "\n\n", "x" * 30_000]), max_size=30))
def test_the_pieces_of_a_long_text_join_to_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = list(sources.split_at_paragraphs([text]))
    assert "".join(pieces) == text
    assert all(len(piece) <= sources.LONGEST_PIECE for piece in pieces)
    assert list(sources.split_at_paragraphs(parts)) == pieces
    assert list(sources.split_at_paragraphs(text[n : n + 7919] for n in range(0, len(text), 7919))) == pieces


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Replace the package datasets, which an installation may lack, by an empty module."""
    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def test_a_hub_corpus_is_streamed_up_to_the_token_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: ModuleType
) -> None:
    requests = []
    rows_read = 0

    def rows() -> object:
        nonlocal rows_read
        for number in range(10**6):
            rows_read += 1
            yield {"text": f"Row {number} of a long stream."}

    def load_dataset(path: str, name: str | None, **options: object) -> object:
        requests.append((path, name, options))
        return rows()

    monkeypatch.setattr(hub, "load_dataset", load_dataset, raising=False)
    monkeypatch.setattr(sources, "probe_hub", lambda *_: None)
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(shards, "SMALL_CHARACTERS", 4000)
    corpus = prepared(source(tmp_path, kind="fineweb-edu", max_tokens=5000))
    assert requests == [("HuggingFaceFW/fineweb-edu", "sample-10BT", {"split": "train", "streaming": True})]
    assert 5000 <= len(corpus.train) + len(corpus.validation) < 6000
    assert rows_read < 2000


@pytest.mark.usefixtures("hub")
def test_an_unreachable_hub_is_an_error_that_names_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be reached.*CONFIG_DATASET_FILES.*CONFIG_DATASET_EMBEDDED"):
        prepare(source(tmp_path, kind="tinystories"), ignore)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_embedded_text_is_the_standard_library_without_its_tests() -> None:
    files = sources.embedded_files()
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in files)
    assert sum(path.stat().st_size for path in files) > 5_000_000
