"""Inline text of a document, and its escaping for HTML, Markdown, terminals and figures.

A plain string is data: every renderer escapes it. Emphasis, code, links and color labels are small types, so that
nothing is escaped twice and nothing is ever un-escaped. A `Text` is one of them or a tuple of them.
"""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

WIDTH = 100  # columns of the terminal


@dataclass(frozen=True)
class Strong:
    """Bold text. bad: in the color of a warning in HTML."""

    text: str
    bad: bool = False


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Link:
    """text leads to `address`, a path relative to the document or an https address."""

    text: str
    address: str


@dataclass(frozen=True)
class ColorLabel:
    """A name behind a dot of palette color `index` in HTML; the bare name elsewhere."""

    text: str
    index: int


@dataclass(frozen=True)
class Detail:
    """Smaller type on a line of its own in HTML; the same line elsewhere."""

    text: str


Inline = str | Strong | Code | Link | ColorLabel | Detail
Text = Inline | tuple[Inline, ...]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: 1 document, 1,200 documents."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def pieces(text: Text) -> tuple[Inline, ...]:
    """The inline parts of a text, without empty strings."""
    parts = text if isinstance(text, tuple) else (text,)
    return tuple(part for part in parts if part != "")


def join(separator: str, texts: Iterable[Text]) -> Text:
    """One text with `separator` between the given ones."""
    joined: list[Inline] = []
    for number, text in enumerate(texts):
        joined += [separator] if number else []
        joined += pieces(text)
    return tuple(joined)


def number_with_detail(cell: str) -> Text:
    """A number, and its interval in brackets or its remark in parentheses as a detail."""
    found = re.fullmatch(r"([-+]?[\d.,e+]+(?: %)?) ([\[(].*)", cell)
    return (found[1], Detail(found[2])) if found else cell


def single_line(value: str) -> str:
    """Replace control and direction characters by spaces, and each run of spaces by one space."""
    return re.sub(" +", " ", "".join(sign if sign.isprintable() else " " for sign in value))


def format_numbers(value: str) -> str:
    """Write minus signs as such, and keep a number on one line with its percent sign and a p-value with its sign."""
    value = re.sub(r"\bp ([<=]) (?=\d)", "p\u00a0\\1\u00a0", value)
    return re.sub(r"(?<![^\s(\[|])-(?=\d)", "\u2212", value).replace(" %", "\u00a0%")


def escape_html(value: str) -> str:
    """Escape one line of data for HTML text, quoted attributes and texts of figures (plotly reads a few tags)."""
    return html.escape(single_line(value).strip())


def escape_markdown(value: str) -> str:
    """Escape one line of data so that no Markdown, HTML or automatic link in it takes effect.

    Underscores within words and brackets without a target after them have no effect and stay readable.
    """
    line = html.escape(single_line(value), quote=False)
    line = re.sub(r"([\\`*|~])|(!)(?=\[)", r"\\\1\2", line)
    line = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)
    line = re.sub(r"\](?=[\[(:])", r"\\]", line)
    return re.sub(r"(?i)(:)(?=//)|(?<=www)(\.)|(?<=\w)(@)", r"\\\1\2\3", line)


def to_html(text: Text) -> str:
    """Render inline text as HTML."""
    return "".join(_html(part) for part in pieces(text)).strip()


def _html(part: Inline) -> str:
    match part:
        case Strong(text, bad):
            tone = ' class="bad"' if bad else ""
            return f"<strong{tone}>{_html(text)}</strong>"
        case Code(text):
            return f"<code>{html.escape(single_line(text))}</code>"
        case Link(text, address):
            return f'<a href="{html.escape(_address(address))}">{html.escape(single_line(text))}</a>'
        case ColorLabel(text, index):
            dot = f'<span class="swatch" style="background:var(--v{index:d})"></span>'
            return dot + html.escape(single_line(text))
        case Detail(text):
            return f"<small>{_html(text)}</small>"
        case str():
            return html.escape(format_numbers(single_line(part)))


def to_markdown(text: Text) -> str:
    """Render inline text as Markdown on one line that begins no block of another kind."""
    line = markdown_cell(text)
    # A list, a rule or a heading begins with a sign, a numbered list with a number and a point, a task with a bracket.
    line = re.sub(r"^([-+=])(?=[-+=\s]|$)|^(#|\[(?=[ xX]\](?:\s|$)))", r"\\\1\2", line)
    return re.sub(r"^(\d+)(?=[.)](?:\s|$))", r"\1\\", line)


def markdown_cell(text: Text) -> str:
    """Render inline text as one cell of a Markdown table."""
    rendered = [_markdown(part) for part in pieces(text)]
    # A bracket or "!" at the end of one part must make no link or image of the next part.
    joined = [_escape_bare(r"[]!]$", part) for part in rendered[:-1]] + rendered[-1:]
    return "".join(joined).strip()


def _escape_bare(pattern: str, line: str) -> str:
    """Escape each match of one character that has no escape yet."""
    return re.sub(rf"\\.|{pattern}", lambda found: found[0] if found[0][0] == "\\" else f"\\{found[0]}", line)


def _markdown(part: Inline) -> str:
    match part:
        case Strong(text):
            inner = escape_markdown(text).strip()
            return f"**{inner}**" if inner else ""
        case Code(text):
            return _markdown_code(single_line(text))
        case Link(text, address):
            return f"[{_escape_bare(r'[][]', escape_markdown(text))}](<{_address(address)}>)"
        case Detail(text):
            return f" {escape_markdown(text)}"
    return escape_markdown(part if isinstance(part, str) else part.text)


def _markdown_code(value: str) -> str:
    """Code between enough backticks; a pipe would end a table's cell, so that such code is escaped text."""
    if "|" in value or not value.strip():
        return escape_markdown(value)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", value)), default=0))
    space = " " if value.startswith("`") or value.endswith("`") else ""
    return f"{fence}{space}{value}{space}{fence}"


def to_plain(text: Text) -> str:
    """Render inline text for the terminal on one line."""
    return single_line("".join(_plain(part) for part in pieces(text))).strip()


def _plain(part: Inline) -> str:
    if isinstance(part, str):
        return part
    return f" {part.text}" if isinstance(part, Detail) else part.text


def wrap(text: Text, indent: str = "", hanging: str = "  ") -> str:
    """Render inline text for the terminal in lines of WIDTH columns; a number keeps its percent sign."""
    line = to_plain(text).replace(" %", "\u00a0%")
    rest = " " * len(indent) + hanging
    wrapped = textwrap.wrap(
        line, WIDTH, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False
    )
    return "\n".join(wrapped).replace("\u00a0", " ")


def _address(address: str) -> str:
    """A relative path or an https address with everything else quoted: no other scheme survives."""
    return quote(address, safe="/:?#=&%.,~+-_" if address.startswith("https://") else "/")
