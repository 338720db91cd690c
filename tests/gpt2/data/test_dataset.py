import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.config.config import DataConfig
from gpt2.data import dataset as data
from gpt2.data import shards, sources, tokenizer
from gpt2.data.dataset import DataError, TokenStream, global_batch, validation_windows


def config(
    directory: Path, dataset: str = "files", files: tuple[str, ...] = (), **changes: int
) -> DataConfig:
    return DataConfig(
        dataset=dataset,
        files=files,
        max_tokens=changes.get("max_tokens", 0),
        directory=directory,
        workers=changes.get("workers", 1),
    )


def write_documents(folder: Path, count: int = 60) -> tuple[str, ...]:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number:03d}.txt").write_text(
            f"Document {number}. " + "All work and some play. " * (number % 7)
        )
    return (str(folder / "*.txt"),)


def quiet(text: str) -> None:
    pass


def stream(tokens: int, shard: int = 50) -> TokenStream:
    values = np.arange(tokens, dtype=np.uint16)
    return TokenStream([values[start : start + shard] for start in range(0, tokens, shard)])


# -- batches ----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    windows=st.integers(1, 40),
    extra=st.integers(1, 6),
    block=st.integers(1, 7),
    effective=st.integers(1, 17),
    seed=st.integers(0, 5),
)
def test_every_window_comes_once_an_epoch_whatever_the_batch(
    windows: int, extra: int, block: int, effective: int, seed: int
) -> None:
    train = stream(windows * block + min(extra, block), shard=13)
    epochs = 3
    rows = np.concatenate(
        [global_batch(train, block, effective, seed, k) for k in range(-(-windows * epochs // effective))]
    )[: windows * epochs]
    for row in rows:
        assert row[0] % block == 0
        assert row.tolist() == list(range(row[0], row[0] + block + 1))
    for epoch in range(epochs):
        firsts = rows[epoch * windows : (epoch + 1) * windows, 0]
        assert Counter(firsts.tolist()) == Counter(range(0, windows * block, block))


def test_the_batch_of_an_iteration_is_a_pure_function_of_data_seed_and_iteration() -> None:
    train = stream(997)
    late_first = [global_batch(train, 8, 5, 3, k) for k in (40, 2, 17)]
    data._order.cache_clear()
    for k, batch in zip((40, 2, 17), late_first, strict=True):
        assert np.array_equal(batch, global_batch(stream(997, shard=101), 8, 5, 3, k))
    assert not np.array_equal(late_first[0], global_batch(train, 8, 5, 4, 40))


def test_the_same_sequences_come_in_the_same_order_whatever_the_effective_batch() -> None:
    train = stream(500)
    small = np.concatenate([global_batch(train, 8, 4, 0, k) for k in range(30)])
    large = np.concatenate([global_batch(train, 8, 12, 0, k) for k in range(10)])
    assert np.array_equal(small, large)


def test_each_epoch_has_an_order_of_its_own() -> None:
    train = stream(801)
    first, second = (global_batch(train, 8, 100, 0, k)[:, 0].tolist() for k in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != sorted(first)


def test_validation_windows_are_the_first_ones_and_fixed() -> None:
    windows = validation_windows(stream(100), block_size=8, tokens=40)
    assert windows.shape == (5, 9)
    assert windows[:, 0].tolist() == [0, 8, 16, 24, 32]
    assert validation_windows(stream(100), block_size=8, tokens=10**9).shape == (12, 9)


def test_too_little_text_is_refused_and_the_remedy_named() -> None:
    with pytest.raises(DataError, match=r"9 tokens, less than one sequence of CONFIG_GPT2_BLOCK_SIZE=9"):
        global_batch(stream(9), 9, 1, 0, 0)
    with pytest.raises(DataError, match="smaller block size"):
        validation_windows(stream(9), 9, 100)


# -- preparing --------------------------------------------------------------------------------------------------


def test_a_prepared_corpus_holds_every_document_once_with_an_end_of_text_after_each(tmp_path: Path) -> None:
    directory = data.prepare(config(tmp_path / "data", files=write_documents(tmp_path / "t")), quiet)
    corpus = data.open_corpus(directory)
    texts: list[str] = []
    for part in (corpus.train, corpus.validation):
        tokens = part.read(0, len(part)).tolist()
        assert tokens[-1] == tokenizer.EOT
        texts += tokenizer.load().decode(tokens).split("<|endoftext|>")[:-1]
    expected = [path.read_text() for path in (tmp_path / "t").iterdir()]
    assert sorted(texts) == sorted(expected)
    assert corpus.manifest.documents == 60
    assert len(corpus.validation) > 0


def test_what_is_prepared_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(shards, "SMALL_CHARACTERS", 600)
    files = write_documents(tmp_path / "t")
    one = data.open_corpus(data.prepare(config(tmp_path / "one", files=files, workers=1), quiet))
    two = data.open_corpus(data.prepare(config(tmp_path / "two", files=files, workers=2), quiet))
    assert one.fingerprint == two.fingerprint


def test_a_document_is_on_the_same_side_of_the_split_wherever_it_stands() -> None:
    texts = [f"text {n}" for n in range(400)]
    train, validation, count = shards.encode(texts, 50)
    backwards = shards.encode(texts[::-1], 50)
    assert count == 400
    assert len(validation) == len(backwards[1])
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.09


def test_end_of_text_written_in_a_document_is_ordinary_text() -> None:
    train, validation, _ = shards.encode(["a <|endoftext|> b"], 0)
    tokens = np.frombuffer(train + validation, dtype="<u2").tolist()
    assert tokens.count(tokenizer.EOT) == 1
    assert tokens[-1] == tokenizer.EOT


def test_preparing_again_does_nothing_and_a_changed_source_is_noticed(tmp_path: Path) -> None:
    settings_ = config(tmp_path / "data", files=write_documents(tmp_path / "t"))
    said: list[str] = []
    first = data.prepare(settings_, said.append)
    assert said
    said.clear()
    assert data.prepare(settings_, said.append) == first
    assert said == []
    (tmp_path / "t" / "003.txt").write_text("another text entirely")
    assert data.prepare(settings_, said.append) != first


def test_an_interrupted_preparation_leaves_nothing_and_the_next_one_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_ = config(tmp_path / "data", files=write_documents(tmp_path / "t"))
    directory, _ = data.corpus_directory(settings_)
    leftover = tmp_path / "data" / f".{directory.name}.999.tmp"
    leftover.mkdir(parents=True)

    def die(*arguments: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "encode", die)
        with pytest.raises(KeyboardInterrupt):
            data.prepare(settings_, quiet)
    assert not directory.exists()
    assert data.prepare(settings_, quiet) == directory
    assert not list((tmp_path / "data").glob("*.tmp")) + list((tmp_path / "data").glob(".*.tmp"))


def test_a_token_limit_ends_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 200)
    files = write_documents(tmp_path / "t", 200)
    corpus = data.open_corpus(data.prepare(config(tmp_path / "d", files=files, max_tokens=2000), quiet))
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
    settings_ = config(tmp_path / "data", files=write_documents(tmp_path / "t"))
    directory = data.prepare(settings_, quiet)
    before = data.open_corpus(directory).fingerprint
    damage(directory / "train-000.bin")
    with pytest.raises(DataError, match=rf"train-000.bin {message}.*make data"):
        data.open_corpus(directory)
    assert data.prepare(settings_, quiet, rebuild=True) == directory
    assert data.open_corpus(directory).fingerprint == before


def test_an_altered_shard_of_the_right_size_is_found_by_the_full_check(tmp_path: Path) -> None:
    settings_ = config(tmp_path / "data", files=write_documents(tmp_path / "t"))
    shard = data.prepare(settings_, quiet) / "train-000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="was altered"):
        data.verify(shard.parent, full=True)


def test_shards_are_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_documents(tmp_path / "t")
    whole = data.open_corpus(data.prepare(config(tmp_path / "whole", files=files), quiet))
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    cut = data.open_corpus(data.prepare(config(tmp_path / "cut", files=files), quiet))
    assert len(cut.manifest.splits["train"].shards) > 5
    assert np.array_equal(whole.train.read(0, len(whole.train)), cut.train.read(0, len(cut.train)))


# -- sources ----------------------------------------------------------------------------------------------------


def test_jsonl_and_parquet_and_markdown_give_their_documents(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "a.md").write_text("# one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"content": "three"}\n')
    parquet.write_table(pyarrow.table({"text": ["four", "five"]}), tmp_path / "c.parquet")
    names = tuple(str(tmp_path / name) for name in ("*.md", "b.jsonl", "**/*.parquet"))
    assert list(sources.documents(config(tmp_path, files=names))) == ["# one", "two", "three", "four", "five"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"x", "unknown kind"),
        ("a.txt", b"caf\xe9", "not UTF-8 text at byte 3"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": 3}\n', "line 2 is no JSON object"),
        ("a.jsonl", b"nonsense\n", "line 1 is no JSON object"),
        ("a.parquet", b"nonsense", "no parquet file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(sources.documents(config(tmp_path, files=(str(tmp_path / name),))))
    assert name in str(caught.value)


def test_a_file_name_with_a_newline_stays_on_one_line_of_the_message(tmp_path: Path) -> None:
    (tmp_path / "a\nb.txt").write_bytes(b"\xff")
    with pytest.raises(DataError) as caught:
        list(sources.documents(config(tmp_path, files=(str(tmp_path / "*.txt"),))))
    assert "\n" not in str(caught.value)


def test_a_glob_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="matches no file"):
        sources.local_files((str(tmp_path / "*.txt"),))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["word " * 900, "\n", "\n\n", "x" * 30_000]), max_size=30))
def test_pieces_of_a_text_are_the_text(parts: list[str]) -> None:
    text = "".join(parts)
    cut = list(sources.split_at_paragraphs(text))
    assert "".join(cut) == text
    assert all(len(piece) <= 4 * sources.PIECE_CHARACTERS + 2 for piece in cut)


def test_a_single_text_file_gives_training_and_validation_text(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"Paragraph {n}. {'words ' * 40}\n\n" for n in range(9000)))
    corpus = data.open_corpus(data.prepare(config(tmp_path / "d", files=(str(tmp_path / "one.txt"),)), quiet))
    assert 0.005 < len(corpus.validation) / len(corpus.train) < 0.2


@pytest.mark.parametrize("count", [1, 2, 8, 19, 20, 36])
def test_few_small_files_give_training_and_validation_text_and_no_token_is_lost(
    tmp_path: Path, count: int
) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    for number in range(count):  # no hash of these falls to validation
        (folder / f"{number:02d}.txt").write_text(f"Text {number}. " + "All work and some play. " * 80)
    settings_ = config(tmp_path / "d", files=(str(folder / "*.txt"),))
    texts = list(sources.documents(settings_))
    train, validation, _ = shards.encode(texts, 50)
    assert not validation
    said: list[str] = []
    corpus = data.open_corpus(data.prepare(settings_, said.append))
    joined = np.concatenate([part.read(0, len(part)) for part in (corpus.train, corpus.validation)])
    assert joined.tobytes() == train
    share = len(corpus.validation) / len(joined)
    assert share == pytest.approx(0.2 if len(joined) < 5000 else 1025 / len(joined), abs=0.01)
    assert f"the last {len(corpus.validation):,} of {len(joined):,} tokens to validation" in " ".join(said)


def test_one_document_that_falls_to_validation_is_split_as_well(tmp_path: Path) -> None:
    texts = (f"Document {n}. " + "All work and some play. " * 80 for n in range(1000))
    (tmp_path / "one.txt").write_text(next(text for text in texts if shards.encode([text], 50)[1]))
    corpus = data.open_corpus(data.prepare(config(tmp_path / "d", files=(str(tmp_path / "one.txt"),)), quiet))
    assert len(corpus.train) > len(corpus.validation) >= shards.SHORTEST_TOKENS


def test_too_few_tokens_for_a_sequence_are_refused_with_the_amount_of_text_that_is_enough(
    tmp_path: Path,
) -> None:
    (tmp_path / "one.txt").write_text("All work and some play. " * 80)
    settings_ = config(tmp_path / "d", files=(str(tmp_path / "one.txt"),))
    manifest = data.verify(data.prepare(settings_, quiet))
    data.check_length(manifest, 16)
    with pytest.raises(DataError, match=r"needs 129 of each; fix: use at least ([\d,]+) tokens") as caught:
        data.check_length(manifest, 128)
    enough = int(str(caught.value).split("at least ")[1].split()[0].replace(",", ""))
    (tmp_path / "one.txt").write_text("All work and some play. " * (enough // 6 + 1))
    data.check_length(data.verify(data.prepare(settings_, quiet)), 128)


def test_a_text_too_short_for_two_parts_is_refused_and_leaves_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("All work and some play.")
    with pytest.raises(DataError, match=r"the text has 7 tokens; .* fewer than 85; fix: use more text"):
        data.prepare(config(tmp_path / "d", files=(str(tmp_path / "one.txt"),)), quiet)
    assert not [path for path in (tmp_path / "d").iterdir() if path.is_dir()]


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    settings_ = config(tmp_path / "d", files=(str(tmp_path / "*.txt"),))
    with pytest.raises(DataError, match=r"every file is empty: '.*empty\.txt'"):
        data.prepare(settings_, quiet)
    (tmp_path / "full.txt").write_text("All work and some play. " * 400)
    said: list[str] = []
    data.prepare(settings_, said.append)
    assert any(line == f"data: empty, adds no text: '{tmp_path / 'empty.txt'}'" for line in said)


def test_the_hash_split_of_a_corpus_that_needs_no_tail_is_what_it_was(tmp_path: Path) -> None:
    corpus = data.open_corpus(
        data.prepare(config(tmp_path / "d", files=write_documents(tmp_path / "t")), quiet)
    )
    assert corpus.fingerprint == "e107bc0bf4e8f8b3e436da1ad87d42652e372cac5e8bb1828120856af5c18ca6"


def test_wikitext_lines_become_articles() -> None:
    lines = ["", " = One = \n", " text \n", " = = Section = = \n", " more \n", " = Two = \n", " end \n"]
    assert [a.strip().splitlines()[0].strip() for a in sources.group_articles(iter(lines[1:]))] == [
        "= One =",
        "= Two =",
    ]
    assert "".join(sources.group_articles(iter(lines))) == "".join(lines)


def test_the_hub_is_read_as_a_stream_up_to_the_token_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    given_out = 0

    def rows() -> object:
        nonlocal given_out
        for number in range(10**6):
            given_out += 1
            yield {"text": f"Row {number} of a long stream."}

    def load_dataset(path: str, name: str | None, **options: object) -> object:
        asked.append((path, name, options))
        return rows()

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(sources, "probe_hub", lambda path: None)
    monkeypatch.setattr(shards, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(shards, "SMALL_CHARACTERS", 4000)
    corpus = data.open_corpus(data.prepare(config(tmp_path, "fineweb-edu", max_tokens=5000), quiet))
    assert asked == [("HuggingFaceFW/fineweb-edu", "sample-10BT", {"split": "train", "streaming": True})]
    assert 5000 <= len(corpus.train) + len(corpus.validation) < 6000
    assert given_out < 2000


def test_offline_fails_at_once_and_names_the_alternatives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be reached.*CONFIG_DATASET_FILES.*CONFIG_DATASET_EMBEDDED"):
        data.prepare(config(tmp_path, "tinystories"), quiet)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_embedded_text_is_the_standard_library_without_its_tests() -> None:
    files = sources.embedded_files()
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in files)
    assert sum(path.stat().st_size for path in files) > 5_000_000


def test_the_manifest_says_where_the_text_came_from(tmp_path: Path) -> None:
    directory = data.prepare(config(tmp_path / "data", files=write_documents(tmp_path / "t")), quiet)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert len(manifest["source"]["files"]) == 60
    assert manifest["tokenizer"] == tokenizer.SHA256
