"""Test which text becomes training text and which validation text."""

from pathlib import Path

import numpy as np
import pytest

from gpt2 import dataset, shards, tokenizer
from gpt2 import text_sources as sources
from gpt2.dataset import prepare
from gpt2.text_sources import DataError
from tests.gpt2.corpora import ignore, prepared, source, write_documents


@pytest.mark.parametrize("count", [1, 19, 36])
def test_few_small_files_give_training_and_validation_text_without_losing_a_token(
    tmp_path: Path, count: int
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(count):  # no hash of these falls to validation
        (folder / f"{number:02d}.txt").write_text(f"Text {number}. " + "All work and some play. " * 80)
    config = source(tmp_path / "d", folder / "*.txt")
    texts = list(sources.documents(config))
    train, validation, *_ = shards.encode(texts, 50, "gpt2")
    assert not validation
    messages: list[str] = []
    corpus = prepared(config, messages.append)
    joined = np.concatenate([part.read(0, len(part)) for part in (corpus.train, corpus.validation)])
    assert joined.tobytes() == train
    share = len(corpus.validation) / len(joined)
    assert share == pytest.approx(0.2 if len(joined) < 5000 else 1025 / len(joined), abs=0.01)
    assert f"the last {len(corpus.validation):,} of {len(joined):,} tokens to validation" in " ".join(
        messages
    )


def test_too_few_tokens_for_a_sequence_are_refused_with_a_sufficient_amount_of_text(
    tmp_path: Path,
) -> None:
    (tmp_path / "one.txt").write_text("All work and some play. " * 80)
    config = source(tmp_path / "d", tmp_path / "one.txt")
    manifest = dataset.verify(prepare(config, ignore))
    dataset.check_length(manifest, 16)
    with pytest.raises(DataError, match=r"needs 129 of each; fix: use at least ([\d,]+) tokens") as caught:
        dataset.check_length(manifest, 128)
    enough = int(str(caught.value).split("at least ")[1].split()[0].replace(",", ""))
    (tmp_path / "one.txt").write_text("All work and some play. " * (enough // 6 + 1))
    dataset.check_length(dataset.verify(prepare(config, ignore)), 128)


def test_a_text_too_short_for_two_parts_is_refused_and_leaves_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("All work and some play.")
    with pytest.raises(
        DataError, match=r"has 7 tokens, .* need 85 or more; fix: use .* 645 for a block size of 128"
    ):
        prepare(source(tmp_path / "d", tmp_path / "one.txt"), ignore)
    assert not [path for path in (tmp_path / "d").iterdir() if path.is_dir()]


def test_the_hash_split_of_a_corpus_is_pinned(tmp_path: Path) -> None:
    corpus = prepared(source(tmp_path / "d", write_documents(tmp_path / "texts")))
    assert corpus.fingerprint == "e107bc0bf4e8f8b3e436da1ad87d42652e372cac5e8bb1828120856af5c18ca6"


def test_the_split_of_a_document_does_not_depend_on_its_position() -> None:
    texts = [f"text {n}" for n in range(400)]

    def decoded(texts: list[str]) -> list[list[str]]:
        *splits, count, _ = shards.encode(texts, 50, "gpt2")
        assert count == 400
        tokens = [np.frombuffer(split, dtype="<u2").tolist() for split in splits]
        return [
            sorted(tokenizer.decode(tokenizer.load("gpt2"), part).split("<|endoftext|>")[:-1])
            for part in tokens
        ]

    train, validation = decoded(texts)
    assert decoded(texts[::-1]) == [train, validation]
    assert sorted(train + validation) == sorted(texts)
    assert 0.02 < len(validation) / len(texts) < 0.09
