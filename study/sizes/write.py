"""Write sizes.json, sizes.md and sizes.html of a study of several sizes. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2.system.errors import UserError
from gpt2.system.files import write_json, write_text
from gpt2.system.resource_errors import disk_full
from pages.document import render_markdown, render_terminal
from pages.page import render_html
from study.sizes.build import FILE, as_json, build_sizes
from study.sizes.page import sizes_document


def write_sizes(directory: Path, sizes: Sequence[str]) -> str:
    """Build the page of these sizes from the records in `directory`-SIZE. Returns its text for the terminal."""
    report = build_sizes(directory, sizes)
    document = sizes_document(report)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "sizes.html", render_html(document))
        write_text(directory / "sizes.md", render_markdown(document))
        write_json(directory / FILE, as_json(report))
    except OSError as error:
        if disk_full(error):  # run_command names the fix
            raise
        raise UserError(
            f"the page in {directory} cannot be written: {error.strerror or error}; the records are complete; fix: "
            "make the folder writable, then run `make report`"
        ) from error
    return f"{render_terminal(document)}\n\nsizes: {directory / 'sizes.html'} (and .md)"
