"""The page that watches a study. It asks the server for the state every few seconds."""

from __future__ import annotations

from pathlib import Path

from pages.markup import escape_html
from pages.page import POLICY, html_file, plotly_library

COLUMNS = ("run", "state", "done", "loss", "tok/s", "peak memory", "host", "place")


def live_page(study: str) -> str:
    """Return the page of a study."""
    headings = "".join(f'<th scope="col">{escape_html(name)}</th>' for name in COLUMNS)
    body = (
        f"<header><h1>{escape_html(study)}</h1>"
        '<p id="summary" role="status" aria-live="polite">reading the records</p></header>\n'
        '<p class="note" id="trouble" role="alert"></p>\n'
        '<h2>Training loss</h2>\n<div id="curves" role="img" aria-label="Training loss of each run by iteration; '
        'the table below has the last values"></div>\n<p class="note" id="left-out"></p>\n'
        f"<h2>Runs</h2>\n<table><thead><tr>{headings}</tr></thead>"
        '<tbody id="runs"></tbody></table>\n<ul id="reasons"></ul>\n'
        '<p id="report" hidden><a href="report.html">The report</a> of the finished runs</p>\n'
        "<noscript><p>This page needs JavaScript. <code>make status</code> prints the same table.</p></noscript>"
    )
    script = Path(__file__).with_name("live.js").read_text(encoding="utf-8")
    scripts = f"<script>{plotly_library()}</script>\n<script>{script}</script>\n"
    return html_file(study, body, scripts, policy=f"{POLICY}; connect-src 'self'")
