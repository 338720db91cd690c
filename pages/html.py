"""HTML by hand, for the pages that are not yet built from `pages.document`."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import Any

from pages.components import COLORS as COLOURS
from pages.components import FIXED_COLORS as FIXED_COLOURS
from pages.components import color as colour
from pages.components import palette_index as place
from pages.page import asset
from pages.page import shell as page

__all__ = ["COLOURS", "FIXED_COLOURS", "asset", "colour", "page", "place"]
Figure = dict[str, Any]
Place = Callable[
    [str, Figure | None, str], str
]  # (name, figure, caption) -> its HTML, empty without a figure


def text(value: str) -> str:
    """A text of a record on one line, with no effect on the page or in a figure (plotly reads tags)."""
    return html.escape(" ".join("".join(sign if sign.isprintable() else " " for sign in value).split()))


def typeset(cell: str) -> str:
    """Plain text with numbers in it as HTML."""
    return numbers(text(cell))


def numbers(markup: str) -> str:
    """Minus signs that are, and no line break before a percent sign; markup that has no attributes."""
    return re.sub(r"(?<![\w.])-(?=\d)", "\u2212", markup).replace(" %", "\u00a0%")


def marked(line: str) -> str:
    """A sentence of `study.report.sentences` (inert Markdown with **bold**) as HTML."""
    bold, made = False, ""
    for part in re.split(r"(\\.|\*\*)", line):
        if part == "**":
            made += "</strong>" if bold else "<strong>"
            bold = not bold
        else:
            made += part[1:] if part.startswith("\\") else part
    return numbers(made + ("</strong>" if bold else ""))


def bullets(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>" if lines else ""


def section(heading: str, *parts: str) -> str:
    """A heading and what is under it; nothing where nothing is."""
    return f"<h2>{heading}</h2>\n" + "\n".join(part for part in parts if part) if any(parts) else ""


def note(line: str) -> str:
    """A remark in small type; `line` is HTML."""
    return f'<p class="note">{line}</p>'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], prose: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; the columns `prose` hold text, the others numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kind = [' class="text"' if place in prose else "" for place in range(len(row))]
        return "".join(f"<{tag}{kind[place]}>{cell}</{tag}>" for place, cell in enumerate(row))

    top = f"<thead><tr>{cells('th', headings)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def swatch(variant: str, variants: Sequence[str]) -> str:
    """The variant's name behind a dot of its colour."""
    return (
        f'<span class="swatch" style="background:{colour(variant, variants)}"></span>{html.escape(variant)}'
    )


def legend(variants: Sequence[str]) -> str:
    """Buttons that show and hide a variant in every figure."""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-variant="{html.escape(text(name))}">'
        f"{swatch(name, variants)}</button>"
        for name in variants
    )
    return f'<div class="legend">{buttons}<span class="soft">click to hide or show</span></div>'


def plot(name: str, figure: Figure, caption: str) -> str:
    """The place of a figure on the page, its switches above it; `name` is its key in `page`'s figures."""
    switches = ""
    for number, choice in enumerate(figure.get("choices", [])):
        if len(choice["options"]) < 2:
            continue
        options = "".join(
            f'<input type="radio" id="{name}-{number}-{value}" name="{name}-{number}" value="{value}" '
            f'data-figure="{name}" data-choice="{number}"{" checked" if value == 0 else ""}>'
            f'<label for="{name}-{number}-{value}">{html.escape(option["name"])}</label>'
            for value, option in enumerate(choice["options"])
        )
        switches += (
            f'<fieldset class="choice"><legend>{html.escape(choice["label"])}</legend>{options}</fieldset>'
        )
    switches = f'<div class="choices">{switches}</div>' if switches else ""
    height = figure["layout"].get("height", 400)
    return (
        f'<figure>{switches}<div class="plot" id="{name}" style="--height:{height}px"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )
