"""The held-out texts: words, bytes and tokens as the field counts them, and the refusals."""

import json
from pathlib import Path

import pytest

from gpt2 import text_sources as sources
from gpt2 import validation
from gpt2.text_sources import DataError
from gpt2.validation import read_text
from runtime.errors import UserError
from runtime.settings import DataConfig, EvalSet
from tests.published import published

RAW = (
    " \n = Robert <unk> = \n \n He was born in 1 @,@ 984 , in London . \n = = Career = = \n"
    ' He said : " it is good " ( really ) . \n = Second = \n It rose by 3 @.@ 5 ° C . \n'
)


def data(folder: Path, name: str = "bytes") -> DataConfig:
    return DataConfig("files", (), 0, folder / "prepared", 1, name)


def read(folder: Path, name: str, pattern: str, tokens: str = "bytes", block: int = 8) -> validation.EvalText:
    return read_text(
        EvalSet(name, pattern and str(folder / pattern)), data(folder, tokens), block, report=print
    )


def test_words_are_the_parts_between_white_space_and_bytes_those_of_utf_8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a café\n on  the corner", encoding="utf-8")
    (tmp_path / "b.md").write_text("end\n")
    found = read(tmp_path, "news", "*.*")
    assert len(found.documents) == 2
    assert found.words == 5 + 2  # the last line end is followed by an empty part, as in the harness
    assert found.bytes == found.tokens == len("a café\n on  the cornerend\n".encode())
    assert bytes(found.documents[0].tolist()).decode() == "a café\n on  the corner"


def test_a_digest_changes_with_the_text_and_the_borders_of_documents_and_not_with_the_files_name(
    tmp_path: Path,
) -> None:
    for name, texts in (("one", ["ab cd ef gh"]), ("same", ["ab cd ef gh"]), ("two", ["ab cd ", "ef gh"])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    one, same, two = (read(tmp_path, "t", f"{name}.jsonl") for name in ("one", "same", "two"))
    assert one.text_sha256 == same.text_sha256
    assert one.text_sha256 != two.text_sha256
    assert read(tmp_path, "t", "one.jsonl", "gpt2", 2).text_sha256 == one.text_sha256


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nothing/*.txt", r"CONFIG_EVAL_SETS: news: '.*nothing/\*.txt' matches no file; fix: "),
        ("empty.txt", "CONFIG_EVAL_SETS: news: '.*empty.txt' is empty; fix: name a file with text"),
        ("image.png", "CONFIG_EVAL_SETS: news: '.*image.png' is of an unknown kind; fix: use .txt, .md"),
        (
            "short.txt",
            "the text of news has 5 tokens, less than one sequence of CONFIG_GPT2_BLOCK_SIZE=8; fix: more",
        ),
        ("latin.txt", "latin.txt is not UTF-8 text at byte 0; fix: convert the file"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_with_the_fix(
    tmp_path: Path, pattern: str, message: str
) -> None:
    for name, content in (
        ("empty.txt", b""),
        ("image.png", b"x"),
        ("short.txt", b"short"),
        ("latin.txt", b"\xe9" * 99),
    ):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path, "news", pattern)
    if pattern not in ("short.txt", "latin.txt"):  # found without reading
        with pytest.raises(DataError, match=message):
            sources.check_eval_files([EvalSet("news", str(tmp_path / pattern))])


def test_wikitext_has_articles_without_marks_and_counts_the_original(tmp_path: Path) -> None:
    (tmp_path / "wiki.test.raw").write_text(RAW, encoding="utf-8")
    found = read(tmp_path, "wikitext-2", "wiki.test.raw")
    texts = [bytes(document.tolist()).decode() for document in found.documents]
    assert texts == [
        ' = Robert <unk> =\n\nHe was born in 1,984, in London.\n== Career ==\nHe said: "it is good" (really). ',
        " = Second =\nIt rose by 3.5°C.\n",
    ]
    articles = list(validation.articles(RAW))
    assert found.bytes == sum(len(article.encode()) for article in articles)
    assert found.words == sum(len([*article.split()]) + 2 for article in articles)
    plain = read(tmp_path, "other", "wiki.test.raw")
    assert len(plain.documents) == 1
    assert plain.bytes == len(RAW.encode())


def test_the_published_text_has_the_documents_words_and_bytes_of_the_harness(tmp_path: Path) -> None:
    path = published("wikitext2/wiki.test.raw")
    found = read_text(EvalSet("wikitext-2", str(path)), data(tmp_path, "gpt2"), 1024, report=print)
    # lm-evaluation-harness 0.4.13, task wikitext: 62 documents; words and bytes before the marks are removed
    assert (len(found.documents), found.words, found.bytes) == (62, 241335, 1290527)
    assert found.tokens == 272031
