"""Render a document as one HTML file that loads nothing: style, figures, their data and plotly.js are inside.

A figure is plain data (`referee.pages.figures`), drawn by page.js with plotly.js:

    data, layout  as in plotly.js; a color may be "var(--v1)" or "var(--v1, 0.2)", a color of page.css,
                  or "mix(--v1, --v5, 0.25)", one between two of them
    choices       switches, one option of each in force (a single option always is):
                  [{"label": ..., "options": [{"name": ..., "data": [a patch a trace], "layout": a patch}]}]
    narrow        a patch of the layout for narrow screens

The page's legend hides and shows traces by their legendgroup. A line carries its `meta`, a text, at its right end.
Texts of figures pass through `markup.escape_html`.
"""

from __future__ import annotations

import functools
import gzip
import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from referee.pages.document import (
    HTML,
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
    figures,
)
from referee.pages.markup import ColorLabel, Text, escape_html, pieces, to_html, to_plain

# The HTML of a table: it scrolls inside its box; a page script adds sorting.


def table_html(table: Table, label: str) -> str:
    """The table, plain without a script. label: its name for a screen reader, such as the heading above it."""
    name = escape_html(label) or "table"
    head = f"<thead><tr>{_cells(table, table.headings, head=True)}</tr></thead>"
    body = "".join(f"<tr>{_cells(table, row)}</tr>" for row in table.rows)
    mark = " data-sortable" if table.sortable else ""
    # A box that scrolls is reached by the keyboard.
    return (
        f'<div class="scroll" role="group" tabindex="0" aria-label="{name}">'
        f"<table{mark}>{head}<tbody>{body}</tbody></table></div>"
    )


def _cells(table: Table, row: Sequence[Text], head: bool = False) -> str:
    found = ""
    for column, cell in enumerate(row):
        kind = ' class="text"' if column in table.text_columns else ""
        scope = ' scope="col"' if head else ' scope="row"' if column == 0 and pieces(cell) else ""
        tag = "th" if scope else "td"
        found += f"<{tag}{scope}{kind}>{to_html(cell)}</{tag}>"
    return found


# The HTML of sections, lists, legends, color labels and figures, and the size of the palette that pages share.


COLORS = 10  # --v0 .. --v9 of page.css
LONG = 5  # sections from which a page has links to them


@dataclass
class BlockPlace:
    """Where a block is. heading: the nearest one above it. sections: (id, heading) of the sections so far."""

    heading: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)

    def enter(self, heading: Text) -> str:
        """Begin a section and return its id."""
        self.heading = to_plain(heading)
        word = "section-" + re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-")
        taken = {key for key, _ in self.sections}
        key = next(
            key for number in count(1) if (key := f"{word}-{number}" if number > 1 else word) not in taken
        )
        self.sections.append((key, self.heading))
        return key


def render_blocks(blocks: Iterable[Block], place: BlockPlace | None = None) -> str:
    """The blocks as HTML, empty ones left out. place: collects the sections."""
    at = place or BlockPlace()
    return "\n".join(filter(None, (_block(block, at) for block in blocks)))


def _block(block: Block, place: BlockPlace) -> str:
    match block:
        case Paragraph(text) if pieces(text):
            return f"<p>{to_html(text)}</p>"
        case Note(text) if pieces(text):
            return f'<p class="note">{to_html(text)}</p>'
        case BulletList(items, small) if items:
            kind = ' class="small"' if small else ""
            return f"<ul{kind}>{''.join(f'<li>{to_html(item)}</li>' for item in items)}</ul>"
        case Table(_, rows) if rows:
            return table_html(block, place.heading)
        case Figure(_, spec) if spec:
            return _figure(block, spec)
        case Legend(labels):
            return _legend(labels)
        case Findings(items) if items:
            return f'<ul class="verdicts">{"".join(map(_finding, items))}</ul>'
        case Details(summary, inner) if shown := render_blocks(inner, place):
            return f"<details><summary>{to_html(summary)}</summary>\n{shown}\n</details>"
        case Only(forms, inner) if HTML in forms:
            return render_blocks(inner, place)
        case Section():
            return _section(block, place)
    return ""


def _section(section: Section, place: BlockPlace) -> str:
    """A heading and its blocks; a heading of level 2 has an id."""
    before, entered = place.heading, list(place.sections)
    key = place.enter(section.heading)
    if section.level > 2:
        place.sections.pop()
    shown = render_blocks(section.blocks, place)
    place.heading = before
    if not shown:
        place.sections = entered
        return ""
    mark = f' id="{key}"' if section.level == 2 else ""
    return f"<h{section.level:d}{mark}>{to_html(section.heading)}</h{section.level:d}>\n{shown}"


def contents(place: BlockPlace) -> str:
    """Links to the sections of a long page, folded."""
    if len(place.sections) < LONG:
        return ""
    links = "".join(f'<li><a href="#{key}">{escape_html(text)}</a></li>' for key, text in place.sections)
    return (
        f'<nav aria-label="Sections"><details><summary>Sections</summary><ul>{links}</ul></details></nav>\n'
    )


def _legend(labels: Sequence[ColorLabel]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-name="{escape_html(label.text)}">'
        f"{to_html(label)}</button>"
        for label in labels
    )
    hint = '<span class="soft">click to hide or show</span>'
    return f'<div class="legend" role="group" aria-label="Lines of all figures">{buttons}{hint}</div>'


def _finding(finding: Finding) -> str:
    numbers = f'<span class="numbers">{to_html(finding.numbers)}</span>'
    reason = f'<span class="reason">{to_html(finding.reason)}</span>' if finding.reason else ""
    return (
        f'<li class="{escape_html(finding.kind)}" style="--color: var(--v{finding.label.index:d})">'
        f"<span><strong>{escape_html(finding.label.text)}</strong>"
        f'<span class="said">{to_html(finding.statement)}</span></span>{numbers}{reason}</li>'
    )


def _figure(figure: Figure, spec: dict[str, Any]) -> str:
    """The place of a figure, its switches above it and its caption below."""
    caption = f"<figcaption>{to_html(figure.caption)}</figcaption>" if figure.caption else ""
    name = escape_html(to_plain(figure.caption)) or figure.name
    return (
        f'<figure>{_switches(figure.name, spec["choices"])}<div class="plot" id="{figure.name}" role="img" '
        f'aria-label="{name}" style="--height:{spec["layout"]["height"]:g}px"></div>'
        f"{caption}</figure>"
    )


def _switches(name: str, choices: Sequence[dict[str, Any]]) -> str:
    """A row of radio buttons for each choice of more than one option."""
    rows = ""
    for number, choice in enumerate(choices):
        if len(choice["options"]) < 2:
            continue
        options = "".join(
            f'<input type="radio" id="{name}-{number}-{value}" name="{name}-{number}" value="{value}" '
            f'data-figure="{name}" data-choice="{number}"{" checked" if value == 0 else ""}>'
            f'<label for="{name}-{number}-{value}">{escape_html(option["name"])}</label>'
            for value, option in enumerate(choice["options"])
        )
        rows += (
            f'<fieldset class="choice"><legend>{escape_html(choice["label"])}</legend>{options}</fieldset>'
        )
    return f'<div class="choices">{rows}</div>' if rows else ""


# The browser loads nothing, whatever a text of the page contains.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; form-action 'none'"
)
NO_SCRIPT = '<noscript><p class="note">The figures need JavaScript.</p></noscript>'


@functools.cache
def plotly_library() -> str:
    """plotly.js with its Cartesian traces (scatter, bar, heatmap and others): plotly/README.md has its origin."""
    packed = Path(__file__).parent / "plotly" / "plotly-cartesian.min.js.gz"
    return gzip.decompress(packed.read_bytes()).decode("utf-8").replace("</script", "<\\/script")


@functools.cache
def asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def render_html(document: Document, refresh_seconds: int = 0) -> str:
    """The document as an HTML file. refresh_seconds: after which the browser loads it again; 0: never."""
    subtitle = f"<p>{to_html(document.subtitle)}</p>" if document.subtitle else ""
    header = f"<header><h1>{escape_html(document.title)}</h1>{subtitle}</header>"
    place = BlockPlace()
    blocks = render_blocks(document.blocks, place)
    body = f"{header}\n{contents(place)}{blocks}"
    scripts = ""
    if drawn := figures(document.blocks):
        body += f"\n{NO_SCRIPT}"
        scripts = (
            f"<script>{plotly_library()}</script>\n"
            f'<script type="application/json" id="figures">{script_json(drawn)}</script>\n'
            f"<script>{asset('page.js')}</script>\n"
        )
    if "<table data-sortable>" in blocks:
        scripts += f"<script>{asset('tables.js')}</script>\n"
    refresh = f'<meta http-equiv="refresh" content="{refresh_seconds}">\n' if refresh_seconds else ""
    return html_file(document.title, body, scripts, head=refresh)


def html_file(title: str, body: str, scripts: str = "", style: str = "", head: str = "") -> str:
    """An HTML file with the style of all pages. body, scripts, style, head: as they are, after escaping."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{head}"
        f"<title>{escape_html(title)}</title>\n<style>\n{asset('page.css')}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{scripts}</body>\n</html>\n"
    )
