"""The HTML of tables, lists, legends, color labels and figures, and the palette that pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pages.document import (
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
from pages.markup import ColorLabel, Text, escape_html, pieces, to_html

# Names with the same color on every page (a test holds them equal to ra.names.PATTERNS).
FIXED_COLORS = ("B", "RAEARLY", "RALATE", "RAALL", "RAALT", "RALEARN")
COLORS = 10  # --v0 .. --v9 of page.css


def palette_index(name: str, names: Sequence[str]) -> int:
    """The palette color of a name: fixed for the known ones, the next ones in turn for the others of `names`."""
    if name in FIXED_COLORS:
        return FIXED_COLORS.index(name) % COLORS
    others = [other for other in names if other not in FIXED_COLORS]
    return (len(FIXED_COLORS) + (others.index(name) if name in others else 0)) % COLORS


def color(name: str, names: Sequence[str]) -> str:
    """The color of a name as page.js reads it, the same on every page."""
    return f"var(--v{palette_index(name, names)})"


def color_label(name: str, names: Sequence[str]) -> ColorLabel:
    """The name with the dot of its color."""
    return ColorLabel(name, palette_index(name, names))


def legend(names: Sequence[str]) -> Legend:
    """Buttons for the names in their colors."""
    return Legend([color_label(name, names) for name in names])


def render_blocks(blocks: Iterable[Block]) -> str:
    """The blocks as HTML, empty ones left out."""
    return "\n".join(filter(None, map(_block, blocks)))


def _block(block: Block) -> str:
    match block:
        case Paragraph(text) if pieces(text):
            return f"<p>{to_html(text)}</p>"
        case Note(text) if pieces(text):
            return f'<p class="note">{to_html(text)}</p>'
        case BulletList(items, small) if items:
            kind = ' class="small"' if small else ""
            return f"<ul{kind}>{''.join(f'<li>{to_html(item)}</li>' for item in items)}</ul>"
        case Table(_, rows) if rows:
            return _table(block)
        case Figure(_, spec) if spec:
            return _figure(block, spec)
        case Legend(labels):
            return _legend(labels)
        case Findings(items) if items:
            return f'<ul class="verdicts">{"".join(map(_finding, items))}</ul>'
        case Details(summary, inner) if shown := render_blocks(inner):
            return f"<details><summary>{to_html(summary)}</summary>\n{shown}\n</details>"
        case Only(forms, inner) if HTML in forms:
            return render_blocks(inner)
        case Section(heading, inner, level) if shown := render_blocks(inner):
            return f"<h{level:d}>{to_html(heading)}</h{level:d}>\n{shown}"
    return ""


def _table(table: Table) -> str:
    """A table that scrolls inside its own box."""

    def cells(tag: str, row: Sequence[Text]) -> str:
        kinds = [' class="text"' if column in table.text_columns else "" for column in range(len(row))]
        return "".join(f"<{tag}{kind}>{to_html(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    head = f"<thead><tr>{cells('th', table.headings)}</tr></thead>"
    names = list(dict.fromkeys(table.kinds))
    kinds = [f' class="kind{names.index(kind)}"' for kind in table.kinds] or [""] * len(table.rows)
    body = "".join(f"<tr{kind}>{cells('td', row)}</tr>" for kind, row in zip(kinds, table.rows, strict=True))
    shown = f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'
    return f'<div class="filtered">{_filter(table, names)}{shown}</div>' if names else shown


def _filter(table: Table, names: Sequence[str]) -> str:
    """A box for each kind of row, which hides the rows of this kind."""
    boxes = ""
    for number, name in enumerate(names):
        key, count = f"{table.name}-{number}", table.kinds.count(name)
        boxes += (
            f'<input type="checkbox" class="show{number}" id="{key}" checked>'
            f'<label for="{key}">{escape_html(name)} ({count})</label>'
        )
    return f'<fieldset class="choice boxes"><legend>rows</legend>{boxes}</fieldset>'


def _legend(labels: Sequence[ColorLabel]) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-name="{escape_html(label.text)}">'
        f"{to_html(label)}</button>"
        for label in labels
    )
    return f'<div class="legend">{buttons}<span class="soft">click to hide or show</span></div>'


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
    return (
        f'<figure>{_switches(figure.name, spec["choices"])}<div class="plot" id="{figure.name}" '
        f'style="--height:{spec["layout"]["height"]:g}px"></div>{caption}</figure>'
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
