"""Test the preparation of a corpus: documents, shards, damage, interruption."""

import os
from pathlib import Path

import numpy as np
import pytest

from gpt2 import dataset, shards, tokenizer
from gpt2.dataset import open_corpus, prepare
from gpt2.text_sources import DataError
from tests.gpt2.corpora import ignore, prepared, source, write_documents


def test_a_corpus_holds_every_document_once_with_an_end_of_text_after_each(tmp_path: Path) -> None:
    directory = prepare(source(tmp_path / "data", write_documents(tmp_path / "texts")), ignore)
    corpus = open_corpus(directory)
    texts: list[str] = []
    for part in (corpus.train, corpus.validation):
        tokens = part.read(0, len(part)).tolist()
        assert tokens[-1] == tokenizer.load("gpt2").eot
        texts += tokenizer.decode(tokenizer.load("gpt2"), tokens).split("<|endoftext|>")[:-1]
    expected = [path.read_text() for path in (tmp_path / "texts").iterdir()]
    assert sorted(texts) == sorted(expected)
    assert corpus.manifest.documents == 60
    assert len(corpus.validation) > 0


def test_a_corpus_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(shards, "SMALL_CHARACTERS", 600)
    files = write_documents(tmp_path / "texts")
    one = prepared(source(tmp_path / "one", files, workers=1))
    two = prepared(source(tmp_path / "two", files, workers=2))
    assert one.fingerprint == two.fingerprint


def test_an_end_of_text_marker_in_a_document_is_ordinary_text() -> None:
    train, validation, _, marks = shards.encode(["a <|endoftext|> b"], 0, "gpt2")
    tokens = np.frombuffer(train + validation, dtype="<u2").tolist()
    assert tokens.count(tokenizer.load("gpt2").eot) == 1
    assert marks == {"<|endoftext|>": 1}
    assert tokens[-1] == tokenizer.load("gpt2").eot


def test_a_second_preparation_does_nothing_and_a_changed_source_is_prepared(tmp_path: Path) -> None:
    config = source(tmp_path / "data", write_documents(tmp_path / "texts"))
    messages: list[str] = []
    first = prepare(config, messages.append)
    assert messages
    messages.clear()
    assert prepare(config, messages.append) == first
    assert messages == []
    (tmp_path / "texts" / "003.txt").write_text("another text entirely")
    assert prepare(config, messages.append) != first


def test_an_interrupted_preparation_leaves_no_corpus_and_the_next_one_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = source(tmp_path / "data", write_documents(tmp_path / "texts"))
    directory, _ = dataset.corpus_directory(config)
    leftover = tmp_path / "data" / f".{directory.name}.999.tmp"
    leftover.mkdir(parents=True)

    def die(*arguments: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "encode", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, ignore)
    assert not directory.exists()
    assert prepare(config, ignore) == directory
    assert not list((tmp_path / "data").glob("*.tmp")) + list((tmp_path / "data").glob(".*.tmp"))


def test_a_token_limit_ends_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 200)
    files = write_documents(tmp_path / "texts", 200)
    corpus = prepared(source(tmp_path / "d", files, max_tokens=2000))
    assert 2000 <= len(corpus.train) + len(corpus.validation) < 2300


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-1]), "has .* bytes; the manifest says"),
        (lambda shard: shard.write_bytes(b""), "has 0 bytes"),
        (lambda shard: shard.unlink(), "is missing"),
    ],
)
def test_a_damaged_shard_is_named_with_the_command_that_rebuilds_it(
    tmp_path: Path, damage, message: str
) -> None:  # type: ignore[no-untyped-def]
    config = source(tmp_path / "data", write_documents(tmp_path / "texts"))
    directory = prepare(config, ignore)
    before = open_corpus(directory).fingerprint
    damage(directory / "train-000.bin")
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=rf"train-000.bin {message}.*make data"):
        open_corpus(directory)
    assert prepare(config, ignore, rebuild=True) == directory
    assert open_corpus(directory).fingerprint == before
    assert (tmp_path / "data/damaged" / directory.name / "notes.txt").read_text() == "mine"


def test_a_flipped_bit_is_found_at_the_next_start_although_size_and_times_are_unchanged(
    tmp_path: Path,
) -> None:
    config = source(tmp_path / "data", write_documents(tmp_path / "texts"))
    shard = prepare(config, ignore) / "train-000.bin"
    dataset.check_corpus(shard.parent, 16, ignore)
    before, content = shard.stat(), bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"train-000.bin was altered.*make data"):
        dataset.check_corpus(shard.parent, 16, ignore)
