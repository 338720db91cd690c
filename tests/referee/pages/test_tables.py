"""The HTML of a table: complete without a script, with names for a screen reader, and with its source."""

import html
import re
from typing import Any

from referee.pages.document import (
    COPY,
    FILTER,
    SORT,
    Details,
    Document,
    Figure,
    Paragraph,
    Section,
    Table,
    markdown_table,
    tools,
)
from referee.pages.html_page import render_html
from referee.pages.latex import render_latex

TABLE = Table(["run", "loss"], [["B0 <b>", "4.1"], ["B1", "4.2"], ["", "4.3"]], tools=(SORT, FILTER, COPY))
SPEC: dict[str, Any] = {"data": [{"type": "bar", "name": "a"}], "layout": {"height": 300}, "choices": []}


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


def test_only_a_page_with_tools_carries_their_script() -> None:
    plain = Table(TABLE.headings, TABLE.rows)
    assert "<script" not in page(plain)
    assert "<pre" not in page(plain)
    folded = page(Section("Runs", [Details("25 runs", [TABLE])]))
    assert folded.count("<script>") == 1
    assert 'data-tools="sort filter"' in folded
    assert tools([Section("Runs", [Details("25 runs", [TABLE])])]) == {SORT, FILTER, COPY}
    assert tools([Table(["a"], [], tools=(SORT,))]) == set()


def test_a_long_page_has_links_to_its_sections() -> None:
    names = ["Results", "Results", "Runs", "Σ", "HellaSwag", "Method"]
    inner = Section("inner", [Paragraph("x")], level=3)
    sections = [Section(name, [Paragraph("x"), inner]) for name in names]
    text = page(*sections, Section("empty", []), Figure("hellaswag", SPEC))
    links = re.findall(r'<li><a href="#([\w-]+)">(.*?)</a></li>', text)
    assert [name for _, name in links] == names
    assert [key for key, _ in links] == re.findall(r'<h2 id="([\w-]+)">', text)
    ids = re.findall(r' id="([\w-]+)"', text)
    assert len(set(ids)) == len(ids)
    assert "<nav" not in page(*sections[:4])
