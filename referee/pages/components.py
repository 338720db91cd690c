"""The HTML of sections, lists, legends, color labels and figures, and the size of the palette that pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from referee.pages.document import (
    HTML,
    Block,
    BulletList,
    Details,
    Figure,
    Finding,
    Findings,
    Legend,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
)
from referee.pages.figure_tables import describe, number_blocks
from referee.pages.html_tables import table_html
from referee.pages.markup import ColorLabel, Text, escape_html, pieces, to_html, to_plain

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
            return _figure(block, spec, place)
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


def _figure(figure: Figure, spec: dict[str, Any], place: BlockPlace) -> str:
    """The place of a figure, its switches above it and its caption below, then its numbers behind a fold."""
    caption = f"<figcaption>{to_html(figure.caption)}</figcaption>" if figure.caption else ""
    numbers = render_blocks(number_blocks(figure), place)
    folded = f'<details class="numbers"><summary>numbers of this figure</summary>\n{numbers}\n</details>'
    return (
        f'<figure>{_switches(figure.name, spec["choices"])}<div class="plot" id="{figure.name}" role="img" '
        f'aria-label="{escape_html(describe(figure))}" style="--height:{spec["layout"]["height"]:g}px"></div>'
        f"{caption}</figure>{folded if numbers else ''}"
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
