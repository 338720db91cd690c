"""The HTML file: whole, self-contained, and with the plotly.js that its README names."""

import gzip
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import referee.pages.html_page
from referee.pages.document import Document, Figure
from referee.pages.html_page import plotly_library, render_html, script_json

FOLDER = Path(referee.pages.html_page.__file__).parent
VOID = {"meta", "br", "input"}
SPEC = {"data": [{"type": "bar", "name": "</script><b>"}], "layout": {"height": 300}, "choices": []}


class Elements(HTMLParser):
    """Every element is closed, and the file names nothing to load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href", "srcset"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_well_formed_and_loads_nothing() -> None:
    Elements(render_html(Document("t", [Figure("f", SPEC, "caption")])))


def test_the_data_of_a_figure_cannot_end_its_script() -> None:
    text = render_html(Document("t", [Figure("f", SPEC)]))
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert found
    assert json.loads(found[1]) == {"f": SPEC}
    assert "<" not in script_json(SPEC)


def test_the_plotly_file_has_the_hash_of_its_readme_and_its_licence() -> None:
    packed = gzip.decompress((FOLDER / "plotly" / "plotly-cartesian.min.js.gz").read_bytes())
    readme = (FOLDER / "plotly" / "README.md").read_text()
    assert hashlib.sha256(packed).hexdigest() in readme
    version = re.search(r"plotly\.js \(cartesian - minified\) v([\d.]+)", plotly_library())
    assert version
    assert f"version {version[1]}," in readme
    assert "MIT License" in (FOLDER / "plotly" / "LICENSE").read_text()


def test_pages_imports_no_other_package_of_the_project_and_no_torch() -> None:
    code = (
        "import sys, referee.pages.html_page; "
        "sys.exit(bool({'torch', 'numpy', 'plotly', 'gpt2', 'ra', 'study'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parents[1]).returncode == 0
