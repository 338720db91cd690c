"""The HTML of a table: complete without a script, with names for a screen reader, and with its source."""

import html
import re
from typing import Any

from referee.pages.document import (
    COPY,
    FILTER,
    SORT,
    Document,
    Section,
    Table,
    markdown_table,
)
from referee.pages.html_page import render_html
from referee.pages.latex import render_latex

TABLE = Table(["run", "loss"], [["B0 <b>", "4.1"], ["B1", "4.2"], ["", "4.3"]], tools=(SORT, FILTER, COPY))


def page(*blocks: Any) -> str:
    return render_html(Document("t", blocks))


def test_a_table_names_its_columns_and_rows() -> None:
    text = page(Section("Runs & more", [TABLE]))
    assert re.findall(r'<th scope="col">(.*?)</th>', text) == ["run", "loss"]
    assert re.findall(r'<th scope="row">(.*?)</th>', text) == [
        "B0 &lt;b&gt;",
        "B1",
    ]  # an empty cell is not a heading
    assert text.count("<tr>") == 4
    assert '<div class="scroll" role="group" tabindex="0" aria-label="Runs &amp; more">' in text


def test_the_source_of_a_table_is_on_the_page_without_a_script() -> None:
    text = page(TABLE)
    found = dict(re.findall(r'<pre data-form="(\w+)"[^>]*>(.*?)</pre>', text, re.DOTALL))
    assert html.unescape(found["LaTeX"]) == render_latex(TABLE)
    assert html.unescape(found["Markdown"]) == markdown_table(TABLE)
    assert re.findall(r"<button [^>]*hidden>(.*?)</button>", text) == ["Copy as LaTeX", "Copy as Markdown"]
