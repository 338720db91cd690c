"""Write a diagnosis: diagnose.json, diagnose.html, and compare.html of the records that were compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numerics.diagnose import flow as flows
from numerics.diagnose.flow import Flow, Situation
from numerics.diagnose.page import diagnosis_document
from numerics.diagnose.pair import DifferingValue
from numerics.diagnose.rules import Diagnosis, SymptomFinding
from numerics.dump_files import finite, write_json, writing
from pages.document import render_terminal
from pages.page import render_html

COMPARED = "records"  # folder of the comparison


def write_diagnosis(diagnosis: Diagnosis, flow: Flow, situation: Situation, folder: Path) -> list[Path]:
    """Write the files into `folder`. Returns their paths."""
    paths = [folder / "diagnose.json", folder / "diagnose.html"]
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)
        if flow.comparison is not None:
            from numerics.compare.write import write_comparison

            paths += write_comparison(flow.comparison, folder / COMPARED)
        write_json(paths[0], as_json(diagnosis, flow, situation))
        address = f"{COMPARED}/compare.html" if flow.comparison is not None else ""
        page = render_html(diagnosis_document(diagnosis, flow, address))
        paths[1].write_text(page, encoding="utf-8")
    return paths


def terminal_lines(diagnosis: Diagnosis, flow: Flow, written: Sequence[Path]) -> list[str]:
    """Return the diagnosis, the files, and the commands that are next, each in one line."""
    commands = [f"next{f', {one.machine}' if one.machine else ''}: {one.text}" for one in flow.commands]
    lines = [render_terminal(diagnosis_document(diagnosis, flow)), ""]
    lines += [f"wrote {path}" for path in written]
    lines += [f"first divergence: {flow.cause}"] if flow.cause else []
    return [*lines, *(commands or ["next: nothing"])]


def as_json(diagnosis: Diagnosis, flow: Flow, situation: Situation) -> dict[str, Any]:
    """Return what diagnose.json holds. Numbers that are not finite are null."""
    pair = diagnosis.pair
    return {
        "schema": 1,
        "runs": [side.name for side in pair.sides],
        "machines": [side.machine for side in situation.sides],
        **_finding(diagnosis.finding),
        "also": [_finding(other) for other in diagnosis.findings[1:]],
        "common_steps": len(pair.steps),
        "offset": pair.offset,
        "first_unequal": _place(diagnosis.unequal),
        "first_beyond_rounding": _place(diagnosis.beyond),
        "evaluations": [
            {name: finite(value) for name, value in vars(score).items()} | {"differs": score.differs}
            for score in diagnosis.scores
        ],
        "checklist": None if situation.checks is None else [vars(check) for check in situation.checks],
        "notes": diagnosis.notes,
        **flows.as_json(flow),
    }


def _finding(finding: SymptomFinding) -> dict[str, Any]:
    return {
        "symptom": finding.symptom.name,
        "rule": finding.symptom.rule,
        "section": finding.symptom.section,
        "step": finding.step,
        "run": finding.side,
        "what": finding.what,
        "evidence": finding.evidence,
    }


def _place(place: DifferingValue | None) -> dict[str, Any] | None:
    return None if place is None else {name: finite(value) for name, value in vars(place).items()}
