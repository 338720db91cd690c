"""The HTML of a table: it scrolls inside its own box; page scripts add sorting, filtering and copying."""

from __future__ import annotations

import html
from collections.abc import Sequence

from referee.pages.document import COPY, FILTER, SORT, Table, markdown_table
from referee.pages.latex import render_latex
from referee.pages.markup import Text, escape_html, pieces, to_html


def table_html(table: Table, label: str) -> str:
    """The table, plain without a script. label: its name for a screen reader, such as the heading above it."""
    name = escape_html(label) or "table"
    head = f"<thead><tr>{_cells(table, table.headings, head=True)}</tr></thead>"
    names = list(dict.fromkeys(table.kinds))
    kinds = [f' class="kind{names.index(kind)}"' for kind in table.kinds] or [""] * len(table.rows)
    body = "".join(
        f"<tr{kind}>{_cells(table, row)}</tr>" for kind, row in zip(kinds, table.rows, strict=True)
    )
    tools = " ".join(tool for tool in (SORT, FILTER) if tool in table.tools)
    marks = f' data-tools="{tools}"' if tools else ""
    # A box that scrolls is reached by the keyboard.
    shown = (
        f'<div class="scroll" role="group" tabindex="0" aria-label="{name}">'
        f"<table{marks}>{head}<tbody>{body}</tbody></table></div>"
    )
    if names:
        shown = f'<div class="filtered">{_kinds(table, names)}{shown}</div>'
    return shown + (_source(table, name) if COPY in table.tools else "")


def _cells(table: Table, row: Sequence[Text], head: bool = False) -> str:
    found = ""
    for column, cell in enumerate(row):
        kind = ' class="text"' if column in table.text_columns else ""
        scope = ' scope="col"' if head else ' scope="row"' if column == 0 and pieces(cell) else ""
        tag = "th" if scope else "td"
        found += f"<{tag}{scope}{kind}>{to_html(cell)}</{tag}>"
    return found


def _kinds(table: Table, names: Sequence[str]) -> str:
    """A box for each kind of row, which hides the rows of this kind."""
    boxes = ""
    for number, name in enumerate(names):
        key, count = f"{table.name}-{number}", table.kinds.count(name)
        boxes += (
            f'<input type="checkbox" class="show{number}" id="{key}" checked>'
            f'<label for="{key}">{escape_html(name)} ({count})</label>'
        )
    return f'<fieldset class="choice boxes"><legend>rows</legend>{boxes}</fieldset>'


def _source(table: Table, name: str) -> str:
    """Buttons that copy the table's source, and the source itself, which needs no script."""
    buttons, sources = "", ""
    for form, source in (("LaTeX", render_latex(table)), ("Markdown", markdown_table(table))):
        buttons += f'<button type="button" data-copy="{form}" hidden>Copy as {form}</button>'
        sources += (
            f'<pre data-form="{form}" tabindex="0" role="group" aria-label="{name} as {form}">'
            f"{html.escape(source)}</pre>"
        )
    return (
        f'<div class="source">{buttons}<span role="status" class="soft"></span>'
        f"<details><summary>{name} as LaTeX and Markdown</summary>{sources}</details></div>"
    )
