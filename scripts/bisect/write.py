"""Write a bisection: bisect.json, bisect.md and bisect.html."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gpt2.system import files
from pages.document import Block, Document, Paragraph, Section, Table, render_markdown
from pages.markup import Code
from pages.page import render_html
from scripts.bisect.session import Result
from scripts.bisect.symptoms import ObservedSymptom


def write_bisection(
    folder: Path,
    run: str,
    against: str,
    symptom: ObservedSymptom,
    results: Sequence[Result],
    replays: tuple[int, int],
) -> list[Path]:
    """Write the files into `folder` and return their paths. replays: computed now, and taken from the journal."""
    paths = [folder / f"bisect.{ending}" for ending in ("json", "md", "html")]
    content = {
        "schema": 1,
        "run": run,
        "against": against or None,
        "symptom": {"kind": symptom.kind, "step": symptom.step, "text": symptom.text},
        "results": [dataclasses.asdict(result) for result in results],
        "replays": {"computed": replays[0], "from_journal": replays[1]},
    }
    files.write_json(paths[0], content)
    page = document(run, against, symptom, results)
    files.write_text(paths[1], render_markdown(page))
    files.write_text(paths[2], render_html(page))
    return paths


def document(run: str, against: str, symptom: ObservedSymptom, results: Sequence[Result]) -> Document:
    blocks: list[Block] = [Section("Symptom", [Paragraph(f"{symptom.text}.")])]
    for result in results:
        inner: list[Block] = [Paragraph(f"{result.text}.")]
        if result.fix:
            inner.append(Paragraph(("Setting: ", Code(f'CONFIG_NUMERICS_FIX="{result.fix}"'))))
        inner.append(Table(["tried", "outcome"], [list(row) for row in result.rows], (1,)))
        blocks.append(Section(result.name.capitalize(), inner))
    return Document(f"Bisection of {run}", blocks, f"against {against}" if against else "")
