"""One document, three forms: the same sentences and cells in each, and a table cell is one cell."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee.pages.document import (
    HTML,
    MARKDOWN,
    TERMINAL,
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Finding,
    Findings,
    Legend,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
    render_markdown,
    render_terminal,
)
from referee.pages.html_page import render_html
from referee.pages.markup import WIDTH, ColorLabel, Detail, Strong, to_plain
from tests.referee.pages.test_markup import HOSTILE, words

SPEC: dict[str, Any] = {"data": [], "layout": {"height": 300}, "choices": []}


def everything(word: str) -> Document:
    """Each kind of block once, with the same word everywhere."""
    blocks: list[Block] = [
        Findings([Finding(ColorLabel(word, 1), "better", word, word, word, word)]),
        Paragraph((Strong(word), " ", word)),
        Section(
            word,
            [
                Note(word),
                BulletList([word, (word, Strong(word))]),
                Table([word, word], [[ColorLabel(word, 2), (word, Detail(word))]], (1,)),
                Figure("one", SPEC, word),
                Legend([ColorLabel(word, 3)]),
                Details(word, [Section(word, [Paragraph(word)], level=3)]),
            ],
        ),
    ]
    return Document(word, blocks, subtitle=word)


@pytest.mark.parametrize("word", HOSTILE)
def test_no_text_adds_an_element_to_the_page(word: str) -> None:
    def tags(document: Document) -> list[str]:
        return re.findall(r"<[a-z]+", render_html(document).partition("<script>")[0].partition("<body>")[2])

    assert tags(everything(word)) == tags(everything("word"))


@pytest.mark.parametrize("word", HOSTILE)
def test_no_text_adds_a_line_to_the_markdown_or_leaves_a_tag_in_it(word: str) -> None:
    shown, plain = render_markdown(everything(word)), render_markdown(everything("word"))
    assert shown.count("\n") == plain.count("\n")
    assert not re.search(r"<[/a-zA-Z!]", shown)


@given(words)
def test_no_line_of_the_terminal_is_too_wide_or_controls_it(word: str) -> None:
    for line in render_terminal(everything(word)).splitlines():
        assert len(line) <= WIDTH
        assert line.isprintable()


@given(st.lists(st.lists(words, min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_cell_stays_one_cell(rows: list[list[str]]) -> None:
    shown = render_markdown(Document("", [Table(["a", "b", "c"], rows)])).strip().splitlines()
    assert len(shown) == 2 + len(rows)
    for line in shown:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 4


@given(st.lists(st.lists(st.text("ab |%-\n", max_size=40), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_terminal_table_holds_every_cell_in_order(rows: list[list[str]]) -> None:
    shown = render_terminal(Document("", [Table(["one", "two", "three"], rows)]))
    squeezed = re.sub(r"\s", "", shown)
    for row in rows:
        for cell in row:
            found = re.sub(r"\s", "", to_plain(cell))
            assert found in squeezed
            squeezed = squeezed[squeezed.index(found) :]


def test_columns_are_aligned_and_a_wide_table_becomes_blocks() -> None:
    table = Table(["name", "n"], [["B", "1"], ["RALEARN", "22"]])
    assert render_terminal(Document("", [table])).splitlines() == [
        "name      n",
        "B         1",
        "RALEARN  22",
    ]
    wide = Table(["name", "first", "second"], [["B", "x" * 60, "y" * 60]])
    assert render_terminal(Document("", [wide])).splitlines() == [
        "B",
        f"  first: {'x' * 60}",
        f"  second: {'y' * 60}",
    ]


def test_a_section_without_content_is_not_shown_and_a_block_may_be_of_one_form() -> None:
    blocks = [
        Section("empty", [Section("deeper", [])]),
        Section(
            "empty too", [Paragraph(""), Note(""), BulletList([]), Table(["empty"], []), Figure("f", None)]
        ),
        Details("empty as well", [Findings([])]),
        Only((HTML,), [Paragraph("for the page")]),
        Only((MARKDOWN,), [Paragraph("for the file")]),
        Only((TERMINAL,), [Paragraph("for the terminal")]),
    ]
    document = Document("t", blocks)
    shown = {
        "page": render_html(document).partition("<body>")[2],
        "file": render_markdown(document),
        "terminal": render_terminal(document),
    }
    for name, text in shown.items():
        assert "empty" not in text
        assert [other for other in shown if f"for the {other}" in text] == [name]
