"""A document as plain data, and its Markdown and its terminal form. `referee.pages.html_page` renders it as HTML.

A block without content (text, rows, items, a figure or blocks inside) is not shown in any form.
A sentence is written once: the same blocks feed all three forms. A figure appears in HTML only; `Only` keeps
other blocks to some of the forms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from referee.pages.markup import (
    WIDTH,
    ColorLabel,
    Text,
    escape_markdown,
    markdown_cell,
    pieces,
    to_markdown,
    to_plain,
    wrap,
)

HTML, MARKDOWN, TERMINAL = "html", "markdown", "terminal"
EMPTY = ("", "-")  # cells without a value
Item = TypeVar("Item")


@dataclass(frozen=True)
class Paragraph:
    text: Text


@dataclass(frozen=True)
class Note:
    """A remark in small type."""

    text: Text


@dataclass(frozen=True)
class BulletList:
    """small: in small type in HTML."""

    items: Sequence[Text]
    small: bool = False


@dataclass(frozen=True)
class Table:
    """text_columns: the columns that hold prose, to the left; the first one always is. The others hold numbers.

    sortable: by the headings, in HTML.
    """

    headings: Sequence[Text]
    rows: Sequence[Sequence[Text]]
    text_columns: Sequence[int] = ()
    sortable: bool = False

    @classmethod
    def of(
        cls,
        items: Iterable[Item],
        columns: Mapping[str, Callable[[Item], Text]],
        text_columns: Sequence[int] = (),
        sortable: bool = False,
    ) -> Table:
        """A row for each item. columns: heading -> the cell of an item. A column that is empty in every row goes."""
        rows = [[cell(item) for cell in columns.values()] for item in items]
        kept = [n for n in range(len(columns)) if n == 0 or any(row[n] not in EMPTY for row in rows)]
        left = [place for place, column in enumerate(kept) if column in text_columns]
        shown = [[row[column] for column in kept] for row in rows]
        return cls([list(columns)[column] for column in kept], shown, left, sortable)


@dataclass(frozen=True)
class Figure:
    """A figure for plotly (see html_page.py). name: its key on the page, a word of letters, digits and hyphens.

    spec: None if there is nothing to draw.
    """

    name: str
    spec: dict[str, Any] | None
    caption: Text = ""


@dataclass(frozen=True)
class Details:
    """Blocks behind a fold in HTML; below their summary elsewhere."""

    summary: Text
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Legend:
    """Buttons that show and hide a name in every figure of an HTML page."""

    labels: Sequence[ColorLabel]


@dataclass(frozen=True)
class Finding:
    """One result. kind: better, worse, equivalent, same or unsure. numbers: the measured values.

    sentence: label, statement and numbers in one sentence, for Markdown and the terminal.
    reason: a sentence of explanation, shown in every form.
    """

    label: ColorLabel
    kind: str
    statement: Text
    numbers: Text
    sentence: Text = ""
    reason: Text = ""


@dataclass(frozen=True)
class Findings:
    """The headline of a document, one finding a line."""

    items: Sequence[Finding]


@dataclass(frozen=True)
class Only:
    """Blocks of the named forms (HTML, MARKDOWN, TERMINAL) alone."""

    forms: tuple[str, ...]
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """A heading and its blocks. level 2, or 3 for a part of a section."""

    heading: Text
    blocks: Sequence[Block]
    level: int = 2


Block = Paragraph | Note | BulletList | Table | Figure | Details | Legend | Findings | Only | Section


@dataclass(frozen=True)
class Document:
    title: str
    blocks: Sequence[Block]
    subtitle: Text = ""


def figures(blocks: Iterable[Block]) -> dict[str, dict[str, Any]]:
    """The figures of all blocks by name, in their order."""
    found: dict[str, dict[str, Any]] = {}
    for block in blocks:
        if isinstance(block, Figure) and block.spec:
            if block.name in found or not re.fullmatch(r"[\w-]+", block.name):
                raise ValueError(f"figure name {block.name!r} is used twice or is not one word")
            found[block.name] = block.spec
        elif isinstance(block, Section | Details | Only):
            found |= figures(block.blocks)
    return found


# ---- Markdown and terminal


@dataclass(frozen=True)
class _TextForm:
    """How a form of text shows each part. gap: between blocks within a section or below a summary."""

    name: str
    paragraph: Callable[[Text], str]
    item: Callable[[Text], str]
    table: Callable[[Table], str]
    heading: Callable[[Text, int], str]
    gap: str


def render_markdown(document: Document) -> str:
    """The document as Markdown."""
    head = [f"# {escape_markdown(document.title).strip()}"] if document.title else []
    head += [to_markdown(document.subtitle)] if document.subtitle else []
    return "\n\n".join([*head, *_text_blocks(document.blocks, _MARKDOWN)]) + "\n"


def render_terminal(document: Document) -> str:
    """The document in lines of at most WIDTH columns."""
    head = [wrap(text) for text in (document.title, document.subtitle) if text]
    return "\n\n".join([*head, *_text_blocks(document.blocks, _TERMINAL)])


def _text_blocks(blocks: Iterable[Block], form: _TextForm) -> list[str]:
    return [text for block in blocks if (text := _text_block(block, form))]


def _text_block(block: Block, form: _TextForm) -> str:
    match block:
        case Paragraph(text) | Note(text):
            return form.paragraph(text)
        case BulletList(items):
            return "\n".join(map(form.item, items))
        case Findings(items):
            texts = [(*pieces(one.sentence), " ", *pieces(one.reason)) for one in items if one.sentence]
            return "\n".join(map(form.item, texts))
        case Table(_, rows) if rows:
            return form.table(block)
        case Details(summary, inner) if shown := _text_blocks(inner, form):
            return form.gap.join([form.paragraph(summary), *shown])
        case Only(forms, inner) if form.name in forms:
            return "\n\n".join(_text_blocks(inner, form))
        case Section(heading, inner, level) if shown := _text_blocks(inner, form):
            return form.gap.join([form.heading(heading, level), *shown])
    return ""  # figures, legends, blocks of other forms or without content


def markdown_table(table: Table) -> str:
    """One line a row; a cell is one line whatever it holds."""
    rows = [f"| {' | '.join(map(markdown_cell, row))} |" for row in (table.headings, *table.rows)]
    return "\n".join([rows[0], "|" + "---|" * len(table.headings), *rows[1:]])


def terminal_table(table: Table) -> str:
    """Aligned columns; where they are wider than the terminal, the cells of a row below each other."""
    headings = [to_plain(cell) for cell in table.headings]
    rows = [[to_plain(cell) for cell in row] for row in table.rows]
    for gap in (2, 1):
        lines = align_columns([headings, *rows], {0, *table.text_columns}, gap)
        if max(map(len, lines)) <= WIDTH:
            return "\n".join(lines)
    lines = []
    for row in rows:
        lines.append(wrap(row[0]))
        pairs = zip(headings[1:], row[1:], strict=True)
        lines += [wrap(f"{head}: {cell}" if head else cell, "  ") for head, cell in pairs]
    return "\n".join(lines)


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int], gap: int = 2) -> list[str]:
    """Rows of cells as lines of equal columns. left: the columns aligned to the left; the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [
        [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return [(" " * gap).join(cells).rstrip() for cells in padded]


_MARKDOWN = _TextForm(
    name=MARKDOWN,
    paragraph=to_markdown,
    item=lambda text: f"- {to_markdown(text)}",
    table=markdown_table,
    heading=lambda text, level: f"{'#' * level} {to_markdown(text)}",
    gap="\n\n",
)
_TERMINAL = _TextForm(
    name=TERMINAL,
    paragraph=lambda text: wrap(text, hanging=""),
    item=lambda text: wrap(text, "- ", ""),
    table=terminal_table,
    heading=lambda text, _: wrap(text),
    gap="\n",
)
