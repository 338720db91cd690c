"""Render a document as one HTML file that loads nothing: style, figures, their data and plotly.js are inside.

A figure is plain data (`referee.pages.plots`), drawn by page.js with plotly.js:

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
from pathlib import Path
from typing import Any

from referee.pages.components import BlockPlace, contents, render_blocks
from referee.pages.document import Document, figures, tools
from referee.pages.markup import escape_html, to_html

# The browser loads nothing, whatever a text of the page contains.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; form-action 'none'"
)
NO_SCRIPT = (
    '<noscript><p class="note">The figures need JavaScript. The tables hold every number.</p></noscript>'
)


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
    if tools(document.blocks):
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
