"""The HTML of a table: complete without a script, with names for a screen reader."""

import re
from typing import Any

from referee.pages.document import Document, Section, Table
from referee.pages.html_page import render_html

TABLE = Table(["run", "loss"], [["B0 <b>", "4.1"], ["B1", "4.2"], ["", "4.3"]], sortable=True)


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
