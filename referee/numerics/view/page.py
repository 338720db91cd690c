"""Write the view as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from referee.numerics.compare.compare_records import Comparison
from referee.numerics.compare.comparison_page import comparison_blocks
from referee.numerics.compare.matched_calls import NameMap
from referee.numerics.dump_files import writing
from referee.numerics.view.tree import comparison_tree, first_critical, record_tree
from referee.pages.document import Block, BulletList
from referee.pages.html_page import html_file, render_blocks, script_json
from referee.pages.markup import Code, Text, escape_html, to_html

HERE = Path(__file__).parent
SKELETON = """
<div id="tools" class="tools"></div>
<div class="panes">
<div><div id="heads" aria-hidden="true"></div>
<div id="tree" role="tree" tabindex="0" aria-label="calls"><div id="space"><div id="rows"></div></div></div></div>
<aside id="details" aria-label="the chosen call"></aside>
</div>
<section id="matching"></section>
<noscript><p class="note">The tree needs JavaScript. compare_result.csv has every call of a comparison.</p></noscript>
"""


def write_comparison_view(comparison: Comparison, names: NameMap, path: Path) -> None:
    """Write the first divergence, further differences, and the tree of two compared records."""
    subtitle: Text = ("target ", Code(str(comparison.target)), ", golden ", Code(str(comparison.golden)))
    title = f"Comparison of two records: {comparison.verdict_text}"
    _write(path, title, subtitle, comparison_blocks(comparison), comparison_tree(comparison, names))


def write_record_view(record: Path, path: Path) -> str:
    """Write the tree of one record. NumericsError where it cannot be used or the page cannot be written.

    Returns the first call with normal inputs and a NaN or an infinity in its outputs, with none such within; or "".
    """
    data = record_tree(record)
    calls = sum(len(step["nodes"]) for step in data["steps"])
    bad = [node for step in data["steps"] for node in step["nodes"] if node["levels"][0]]
    lines = [f"{calls} calls in {len(data['steps'])} records", f"{len(bad)} calls with an overflow level"]
    _write(path, "Tree of a record", Code(str(record)), [BulletList(lines, small=True)], data)
    return next(filter(None, (first_critical(step["nodes"]) for step in data["steps"])), "")


def _write(path: Path, title: str, subtitle: Text, blocks: Sequence[Block], data: dict[str, Any]) -> None:
    header = f"<header><h1>{escape_html(title)}</h1><p>{to_html(subtitle)}</p></header>"
    script = (HERE / "tree.js").read_text(encoding="utf-8")
    content = f'<script type="application/json" id="tree-data">{script_json(data)}</script>'
    scripts = f"{content}\n<script>{script}</script>\n"
    body = f"{header}\n{render_blocks(blocks)}{SKELETON}"
    page = html_file(title, body, scripts, (HERE / "tree.css").read_text(encoding="utf-8"))
    with writing(path, "give another path by -o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
