"""`make compare STUDIES="results/a results/b"`: compare studies and write one page.

python -m scripts.compare STUDY_DIR STUDY_DIR [...] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from referee.pages.document import render_terminal
from runtime.errors import UserError, run_command
from study.compare import compare_page as write
from study.compare import compared_studies as build
from study.compare.compare_page import comparison_document
from study.compare.loaded_studies import LoadedStudy
from study.make_arguments import command_arguments


def default_folder(studies: Sequence[LoadedStudy]) -> Path:
    """results/compare-<a>-<b>, in the parent folder of the first study."""
    names = [re.sub(r"[^A-Za-z0-9._]+", "-", study.label).strip("-") for study in studies]
    return Path(os.path.relpath(studies[0].path.resolve().parent)) / "-".join(["compare", *names])


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.compare")
    parser.add_argument("studies", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(command_arguments(("OUT",), paths="STUDIES"))
    comparison = build.build_comparison(arguments.studies)
    folder = arguments.out or default_folder(comparison.studies)
    if (folder / "runs").exists() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"OUT={folder} is a study or a file; fix: name a folder for the comparison")
    written = write.write_comparison(comparison, folder)
    print(render_terminal(comparison_document(comparison)), *(f"wrote {path}" for path in written), sep="\n")
    return 0


if __name__ == "__main__":
    run_command(main)
