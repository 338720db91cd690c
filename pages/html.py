"""A page that needs nothing but itself: style, figures, their data and the plotting library in one file.

A figure is plain data, drawn by page.js with plotly.js (the copy in the plotly package, embedded whole):

    data, layout  as plotly.js has them; a colour may be "var(--v1)" or "var(--v1, 0.2)", a colour of page.css
    choices       switches, one option of each in force (a single option always is):
                  [{"label": ..., "options": [{"name": ..., "data": [a patch a trace], "layout": a patch}]}]
    labelled      whether lines carry their name (meta.label) at the right end
    narrow        a patch of the layout for narrow screens

A trace with meta.variant is hidden and shown by the page's legend. Texts of figures come through `text`, texts of
the page through `html.escape`: neither trusts a record. Needs no torch.
"""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Names with the same colour on every page (a test holds them equal to ra.names.PATTERNS).
FIXED_COLOURS = ("B", "RAEARLY", "RALATE", "RAALL", "RAALT", "RALEARN")

Figure = dict[str, Any]
Place = Callable[
    [str, Figure | None, str], str
]  # (name, figure, caption) -> its HTML, empty without a figure
COLOURS = 10  # --v0 .. --v9 of page.css
NO_LIBRARY = (
    "The figures are missing: the plotly package could not be loaded when this page was written. "
    "Every number is in the tables; install plotly and rebuild the report to see the figures."
)
# Nothing is fetched, whatever a text might ask for.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; form-action 'none'"
)


@functools.cache
def library() -> str:
    """plotly.js as the plotly package ships it; empty where the package is missing or broken."""
    try:
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs()).replace("</script", "<\\/script")
    except Exception:  # a report without figures is better than none
        return ""


@functools.cache
def asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def text(value: str) -> str:
    """A text of a record on one line, with no effect on the page or in a figure (plotly reads tags)."""
    return html.escape(" ".join("".join(sign if sign.isprintable() else " " for sign in value).split()))


def place(variant: str, variants: Sequence[str]) -> int:
    """The variant's place among colours and signs: the known variants have one each, others what is left in turn."""
    if variant in FIXED_COLOURS:
        return FIXED_COLOURS.index(variant) % COLOURS
    others = [name for name in variants if name not in FIXED_COLOURS]
    return (len(FIXED_COLOURS) + (others.index(variant) if variant in others else 0)) % COLOURS


def colour(variant: str, variants: Sequence[str], alpha: float | None = None) -> str:
    """The variant's colour, the same on every page."""
    name = f"--v{place(variant, variants)}"
    return f"var({name})" if alpha is None else f"var({name}, {alpha:g})"


def embedded(value: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


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


def page(title: str, body: str, figures: Mapping[str, Figure]) -> str:
    """The whole file. body: HTML, with a `plot` for each of the figures."""
    script = library() if figures else ""
    missing = f'<p class="warning">{NO_LIBRARY}</p>' if figures and not script else ""
    scripts = (
        f"<script>{script}</script>\n"
        f'<script type="application/json" id="figures">{embedded(dict(figures))}</script>\n'
        f"<script>{asset('page.js')}</script>\n"
        if script
        else ""
    )
    hide = "" if script else "<style>.plot, .choices, .legend, figure { display: none; }</style>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{asset('page.css')}</style>{hide}\n</head>\n"
        f"<body>\n<main>\n{missing}{body}\n"
        '<noscript><p class="note">The figures need JavaScript; every number is in the tables.</p></noscript>\n'
        f"</main>\n{scripts}</body>\n</html>\n"
    )
