"""Write compare.json, compare.md and compare.html."""

from __future__ import annotations

from pathlib import Path

from referee.pages.document import render_markdown
from referee.pages.html_page import render_html
from runtime import files
from runtime.errors import UserError, disk_full
from study.compare.build import StudyComparison, as_json
from study.compare.sections import comparison_document


def write_comparison(comparison: StudyComparison, directory: Path) -> list[Path]:
    """compare.json, compare.md and compare.html in `directory`, each replaced at once; the paths written."""
    document = comparison_document(comparison)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(directory / "compare.json", as_json(comparison))
        files.write_text(directory / "compare.md", render_markdown(document))
        files.write_text(directory / "compare.html", render_html(document))
    except OSError as error:
        if disk_full(error):  # run_command names the fix
            raise
        raise UserError(
            f"{directory} cannot be written: {error.strerror}; fix: OUT=FOLDER with write permission"
        ) from error
    return [directory / name for name in ("compare.json", "compare.md", "compare.html")]
