"""The rule of all files that users bring, and the readers that follow it: one text is the same text in each."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2 import shards, validation
from gpt2 import text_sources as sources
from gpt2.hellaswag import load_items
from gpt2.tokenizer import ALL
from grpo.gsm8k import read_problems
from referee.numerics import text_files
from referee.numerics.text_files import clean, json_lines, read_json, read_text, text_parts
from runtime.errors import UserError
from runtime.settings import DataConfig, EvalSet
from tests.gpt2.corpora import ignore, source

# A text in a file, and what every reader makes of it.
TEXTS = {
    "line separators": ("a\u2028b\u2029c\x85d\x0be\x0cf\x1cg", "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"),
    "carriage returns": ("one\r\ntwo\rthree\n\rfour\r\r\n", "one\ntwo\nthree\n\nfour\n\n"),
    "half a surrogate pair": ("ab \ud83d cd \udc80", "ab \ufffd cd \ufffd"),
    "a surrogate pair": ("ab \ud83d\ude00 cd", "ab \U0001f600 cd"),
    "a mark inside": ("a\ufeffb\ufeff", "a\ufeffb\ufeff"),
    "NUL and controls": ("a\x00b\x1b[0m", "a\x00b\x1b[0m"),
    "special marks": ("once <|endoftext|> upon", "once <|endoftext|> upon"),
}
BOM = b"\xef\xbb\xbf"


def readings(folder: Path, text: str, mark: bytes) -> Iterator[tuple[str, str]]:
    """Yield (reader, text) of every reader, from the file that it reads. mark: before the first line."""

    def written(name: str, value: object) -> Path:
        path = folder / name
        path.write_bytes(mark + json.dumps(value, ensure_ascii=True).encode() + b"\r\n\n")
        return path

    item = {"activity_label": "A", "ctx_a": text, "ctx_b": "", "endings": ["b", "c", "d", "e"], "label": 0}
    problem = {"question": text, "answer": "#### 5"}
    (corpus,) = sources.read_documents(written("a.jsonl", {"text": text}))
    yield "corpus", corpus
    (question,) = read_problems(str(written("p.jsonl", problem)), "train")
    yield "GSM8K", question.question
    (found,) = load_items(written("h.jsonl", item), 0)
    yield "HellaSwag", found.query.removeprefix("A: ")  # without outer white space
    if not any("\ud800" <= sign <= "\udfff" for sign in text):
        (folder / "a.txt").write_bytes(mark + text.encode())
        yield "text", read_text(folder / "a.txt")
    yield "prompt", clean(text)


@pytest.mark.parametrize("mark", [b"", BOM], ids=["", "byte-order mark"])
@pytest.mark.parametrize("name", TEXTS)
def test_one_text_is_the_same_in_every_reader_and_its_ids_bytes_and_words_agree(
    tmp_path: Path, name: str, mark: bytes
) -> None:
    text, expected = TEXTS[name]
    found = dict(readings(tmp_path, text, mark))
    assert found == {each: expected.strip() if each == "HellaSwag" else expected for each in found}
    for tokens, each in ALL.items():
        config = DataConfig("files", (), 0, tmp_path, 1, tokens)
        held_out = validation.read_text(EvalSet("x", str(tmp_path / "a.jsonl")), config, 1, ignore)
        train = np.frombuffer(shards.encode([found["corpus"]], 0, tokens)[0], "<u2").tolist()
        assert train == [*each.encode(text if "\r" not in text else expected), each.eot]
        assert held_out.documents[0].tolist() == train[:-1]
        assert held_out.bytes == len(expected.encode())
        assert tokens != "bytes" or held_out.tokens == held_out.bytes


@given(st.binary(max_size=60), st.sampled_from([1, 2, 7, 2**20]))
def test_parts_join_to_the_text_or_the_bad_byte_is_named(raw: bytes, most: int) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        try:
            expected = raw.removeprefix(BOM).decode().replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            with pytest.raises(UserError, match="is not UTF-8 text at byte"):
                list(text_parts(Path(file.name), most))
        else:
            assert "".join(text_parts(Path(file.name), most)) == expected


def test_a_text_is_read_in_parts_and_a_document_above_the_limit_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two\n\n" * 40_000)
    pieces = list(sources.documents(source(tmp_path, path)))
    monkeypatch.setattr(text_files, "LARGEST", 1000)
    assert list(sources.documents(source(tmp_path, path))) == pieces
    with pytest.raises(UserError, match="has 360,000 bytes, and a document has at most 1,000; fix: divide"):
        read_text(path)
    (tmp_path / "a.json").write_text("[" + "1, " * 1000 + "1]")
    with pytest.raises(UserError, match="has 3,003 bytes"):
        read_json(tmp_path / "a.json")
    with pytest.raises(UserError, match=r"a\.json:1 has more than 99 bytes \(the file has 3,003\)"):
        list(json_lines(tmp_path / "a.json", 99))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"a": 1}\n{"a": 1, "a": 2}', ":2 is not JSON .*twice"),
        (b'{"a": 1}\n\xef\xbb\xbf{}', ":2 is not JSON"),
        (b'{"a": "\xed\xa0\x80"}', ":1 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), ":1 is not UTF-8"),
        (b'{"a": 1}\r{"a": 2}', ":1 is not JSON"),
        (b'{"a": "x\ry"}', ":1 is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", ":1 is not JSON"),
        (b"[" * 100_000, ":1 is not JSON .*deep"),
    ],
)
def test_a_line_that_is_no_json_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.jsonl{says}.*; fix: ") as caught:
        list(json_lines(tmp_path / "a.jsonl"))
    assert len(str(caught.value)) < 400


def test_a_file_counts_once_by_its_real_path_and_loops_of_links_end(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        (tmp_path / folder / "deep/x.txt").write_text(folder)
        for number in range(3):
            (tmp_path / folder / f"loop{number}").symlink_to(tmp_path)
    (tmp_path / "c.txt").symlink_to("a/deep/x.txt")
    globs = ("a/**/*.txt", "**/x.txt", "c.txt", "a/../a/deep/x.txt", "**/deep/**/*.txt")
    found = sources.local_files(tuple(str(tmp_path / each) for each in globs))
    assert sorted(path.read_text() for path in found) == ["a", "b"]
    (tmp_path / "b/.hidden").mkdir()
    (tmp_path / "b/.hidden/y.txt").write_text("hidden")
    assert len(sources.local_files((str(tmp_path / "**/*.txt"),))) == 2
