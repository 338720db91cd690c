"""A document as plain data, and its Markdown and its terminal form. `pages.page` renders it as HTML.

A sentence is written once: the same blocks feed all three forms. A figure appears in HTML only; `Only` keeps
other blocks to some of the forms.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pages.markup import (
    WIDTH,
    ColorLabel,
    Inline,
    Strong,
    Text,
    escape_markdown,
    join,
    markdown_cell,
    pieces,
    to_markdown,
    to_plain,
    wrap,
)

HTML, MARKDOWN, TERMINAL = "html", "markdown", "terminal"


@dataclass(frozen=True)
class Paragraph:
    text: Text


@dataclass(frozen=True)
class Note:
    """A remark in small type."""

    text: Text


@dataclass(frozen=True)
class Warning:
    """A highlighted paragraph."""

    text: Text


@dataclass(frozen=True)
class BulletList:
    """small: in small type in HTML."""

    items: Sequence[Text]
    small: bool = False


@dataclass(frozen=True)
class Table:
    """text_columns: the columns that hold prose, to the left; the first one always is. The others hold numbers."""

    headings: Sequence[Text]
    rows: Sequence[Sequence[Text]]
    text_columns: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """A figure for plotly (see `pages.page`). name: its key on the page, a word of letters, digits and hyphens."""

    name: str
    spec: dict[str, Any]
    caption: Text = ""


@dataclass(frozen=True)
class Details:
    """Blocks behind a fold in HTML; below their summary elsewhere."""

    summary: Text
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Facts:
    """Names with a value each, which may lie behind a fold."""

    rows: Sequence[tuple[str, Text | Details]]


@dataclass(frozen=True)
class Legend:
    """Buttons that show and hide a name in every figure of an HTML page."""

    labels: Sequence[ColorLabel]


@dataclass(frozen=True)
class Finding:
    """One result. kind: better, worse, equivalent, same or unsure. numbers: the measured values.

    sentence: the whole in one sentence, for Markdown and the terminal; composed of the parts where it is empty.
    reason: a sentence of explanation, shown in every form.
    """

    label: ColorLabel
    kind: str
    statement: Text
    numbers: Sequence[Text]
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
    """A heading and its blocks. A section without blocks is not shown. level 2, or 3 for a part of a section."""

    heading: Text
    blocks: Sequence[Block]
    level: int = 2


Block = (
    Paragraph
    | Note
    | Warning
    | BulletList
    | Table
    | Figure
    | Details
    | Facts
    | Legend
    | Findings
    | Only
    | Section
)


@dataclass(frozen=True)
class Document:
    title: str
    blocks: Sequence[Block]
    subtitle: Text = ""
    page_title: str = field(default="")  # of the browser's tab; the title where it is empty


def figures(blocks: Iterable[Block]) -> dict[str, dict[str, Any]]:
    """The figures of all blocks by name, in their order."""
    found: dict[str, dict[str, Any]] = {}
    for block in blocks:
        if isinstance(block, Figure):
            if block.name in found or not re.fullmatch(r"[\w-]+", block.name):
                raise ValueError(f"figure name {block.name!r} is used twice or is not one word")
            found[block.name] = block.spec
        elif isinstance(block, Section | Details | Only):
            found |= figures(block.blocks)
    return found


# ---- Markdown


def render_markdown(document: Document) -> str:
    """The document as Markdown."""
    head = [f"# {escape_markdown(document.title).strip()}"] if document.title else []
    head += [to_markdown(document.subtitle)] if document.subtitle else []
    return "\n\n".join([*head, *_markdown_blocks(document.blocks)]) + "\n"


def _markdown_blocks(blocks: Iterable[Block]) -> list[str]:
    rendered = [_markdown_block(block) for block in blocks]
    return [block for block in rendered if block]


def _markdown_block(block: Block) -> str:
    match block:
        case Paragraph(text) | Note(text):
            return to_markdown(text)
        case Warning(text):
            return f"**Warning:** {to_markdown(text)}"
        case BulletList(items):
            return "\n".join(f"- {to_markdown(item)}" for item in items)
        case Facts(rows):
            return "\n".join(f"- {to_markdown(name)}: {to_markdown(_summary(value))}" for name, value in rows)
        case Findings(items):
            return "\n".join(f"- {to_markdown(sentence)}" for sentence in map(finding_sentence, items))
        case Table():
            return markdown_table(block)
        case Details(summary, inner):
            return "\n\n".join([to_markdown(summary), *_markdown_blocks(inner)])
        case Only(forms, inner):
            return "\n\n".join(_markdown_blocks(inner)) if MARKDOWN in forms else ""
        case Section(heading, inner, level):
            shown = _markdown_blocks(inner)
            return "\n\n".join([f"{'#' * level} {to_markdown(heading)}", *shown]) if shown else ""
    return ""  # figures and legends


def _summary(value: Text | Details) -> Text:
    return value.summary if isinstance(value, Details) else value


def markdown_table(table: Table) -> str:
    """One line a row; a cell is one line whatever it holds."""
    lines = [_markdown_row(table.headings), "|" + "---|" * len(table.headings)]
    return "\n".join([*lines, *map(_markdown_row, table.rows)])


def _markdown_row(cells: Sequence[Text]) -> str:
    return "| " + " | ".join(map(markdown_cell, cells)) + " |"


def finding_sentence(finding: Finding) -> Text:
    """The finding as one sentence, and its reason."""
    sentence = pieces(finding.sentence)
    if not sentence:
        numbers = pieces(join("; ", finding.numbers))
        behind: tuple[Inline, ...] = (" (", *numbers, ")") if numbers else ()
        sentence = (Strong(finding.label.text), ": ", *pieces(finding.statement), *behind, ".")
    return (*sentence, " ", *pieces(finding.reason))


# ---- terminal


def render_terminal(document: Document) -> str:
    """The document in lines of at most WIDTH columns."""
    head = [wrap(text) for text in (document.title, document.subtitle) if text]
    return "\n\n".join([*head, *_terminal_blocks(document.blocks)])


def _terminal_blocks(blocks: Iterable[Block]) -> list[str]:
    rendered = [_terminal_block(block) for block in blocks]
    return [block for block in rendered if block]


def _terminal_block(block: Block) -> str:
    match block:
        case Paragraph(text) | Note(text):
            return wrap(text, hanging="")
        case Warning(text):
            return wrap(("warning: ", *pieces(text)))
        case BulletList(items):
            return "\n".join(wrap(item, "- ", "") for item in items)
        case Facts(rows):
            return "\n".join(wrap((f"{name}: ", *pieces(_summary(value)))) for name, value in rows)
        case Findings(items):
            return "\n".join(wrap(finding_sentence(item), "- ", "") for item in items)
        case Table():
            return "\n".join(terminal_table(block))
        case Details(summary, inner):
            return "\n".join([wrap(summary), *_terminal_blocks(inner)])
        case Only(forms, inner):
            return "\n\n".join(_terminal_blocks(inner)) if TERMINAL in forms else ""
        case Section(heading, inner, _):
            shown = _terminal_blocks(inner)
            return "\n".join([wrap(heading), *shown]) if shown else ""
    return ""  # figures and legends


def terminal_table(table: Table) -> list[str]:
    """Aligned columns; where they are wider than the terminal, the cells of a row below each other."""
    headings = [to_plain(cell) for cell in table.headings]
    rows = [[to_plain(cell) for cell in row] for row in table.rows]
    for gap in (2, 1):
        lines = align_columns([headings, *rows], {0, *table.text_columns}, gap)
        if max(map(len, lines)) <= WIDTH:
            return lines
    lines = []
    for row in rows:
        lines.append(wrap(row[0]))
        pairs = zip(headings[1:], row[1:], strict=True)
        lines += [wrap(f"{head}: {cell}" if head else cell, "  ") for head, cell in pairs]
    return lines


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
