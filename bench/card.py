"""`make card [OUT=folder] [CHECKS="kernels study"]`: check this card; write results/card/card.html and card.json."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.card_checks import (
    DIFFERS,
    NOT_RUN,
    PASS,
    CardCheck,
    CheckedDevice,
    NotRunError,
    Question,
    gate_checks,
    judge,
    not_run,
)
from bench.card_kernels import kernel_checks
from bench.card_speed import speed_checks
from bench.card_studies import budget_checks, memory_checks, out_of_memory_checks, study_checks
from referee.pages.document import Block, Document, Note, Paragraph, Section, Table, render_terminal
from referee.pages.html_page import render_html
from referee.pages.markup import Code, Strong
from runtime.errors import UserError, one_line, run_command
from runtime.files import write_json, write_text
from runtime.provenance import environment_record, revision
from runtime.resolved_target import ResolvedTarget, export_environment, resolve, target_record
from runtime.settings import ANY_TARGET
from study.make_arguments import command_arguments

QUESTIONS: dict[str, Question] = {
    "kernels": kernel_checks,
    "gate gradients": gate_checks,
    "study": study_checks,
    "memory": memory_checks,
    "out of memory": out_of_memory_checks,
    "budget": budget_checks,
    "speed": speed_checks,
}


def check_card(out: Path, chosen: Sequence[str] = ()) -> int:
    """Run every question. Write card.json after each check, so that a killed command loses no line.

    chosen: first words of the questions to run; empty: all.
    """
    questions = {
        name: question for name, question in QUESTIONS.items() if not chosen or name.split()[0] in chosen
    }
    unknown = {*chosen} - {name.split()[0] for name in questions}
    if unknown:
        words = " ".join(name.split()[0] for name in QUESTIONS)
        raise UserError(f"unknown CHECKS: {' '.join(sorted(unknown))}; fix: use words of: {words}")
    began = time.monotonic()
    resolved = resolve(ANY_TARGET)
    origin = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "target": target_record(resolved),
        "revision": dataclasses.asdict(revision()),
        "environment": environment_record().to_json(),
    }
    out.mkdir(parents=True, exist_ok=True)
    print(f"{resolved.device_name}, {resolved.dtype}, torch {resolved.torch}", flush=True)
    checks: list[CardCheck] = []

    def save(check: CardCheck) -> None:
        checks.append(check)
        print(check.line, flush=True)
        seconds = round(time.monotonic() - began, 1)
        rows = [dataclasses.asdict(each) for each in checks]
        write_json(out / "card.json", origin | {"seconds": seconds, "checks": rows})

    with tempfile.TemporaryDirectory(prefix="card-") as folder:
        card = CheckedDevice(resolved, Path(folder))
        for name, question in questions.items():
            try:
                for check in question(card):
                    save(check)
            except NotRunError as reason:
                save(not_run(name, "all checks", f"{reason}"))
            except Exception as error:  # the other questions are independent
                save(judge(name, "all checks", f"{type(error).__name__}: {one_line(error)}", False))
    document = card_document(resolved, checks, out, time.monotonic() - began)
    write_text(out / "card.html", render_html(document))
    print(f"\n{render_terminal(dataclasses.replace(document, blocks=document.blocks[-1:]))}")
    return 1 if any(check.verdict == DIFFERS for check in checks) else 0


def card_document(
    resolved: ResolvedTarget, checks: Sequence[CardCheck], out: Path, seconds: float
) -> Document:
    """Build the page: all checks in one table, and what to report."""
    count = Counter(check.verdict for check in checks)
    summary = (
        f"{len(checks)} checks in {seconds / 60:.1f} minutes: {count[PASS]} pass, {count[DIFFERS]} differ, "
        f"{count[NOT_RUN]} not run"
    )
    versions = (
        f"torch {resolved.torch}, driver {resolved.driver or 'none'}, commit {revision().commit or 'unknown'}"
    )
    table = Table.of(
        checks,
        {
            "check": lambda check: check.name,
            "expected": lambda check: check.expected,
            "measured": lambda check: check.measured,
            "verdict": lambda check: (
                Strong(check.verdict, bad=True) if check.verdict == DIFFERS else check.verdict
            ),
        },
        text_columns=(1, 2, 3),
    )
    different = [check.line for check in checks if check.verdict == DIFFERS]
    report: list[Block] = [
        Paragraph(("Open an issue with the file ", Code(f"{out / 'card.json'}"), " and these versions:")),
        Paragraph(f"{resolved.device_name}, {versions}"),
        Paragraph("Lines that differ:" if different else "No line differs."),
        *map(Note, different),
    ]
    return Document(
        f"Card: {resolved.device_name}",
        [table, Section("What to send back", [Paragraph(summary), *report])],
        subtitle=f"{resolved.target.title}, {resolved.dtype}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make card", description="Check kernels, gradients, studies, memory and speed."
    )
    parser.add_argument("--out", type=Path, default=Path("results/card"), help="folder of the page")
    parser.add_argument(
        "--checks", default="", help='first words of the checks to run, such as "kernels study"'
    )
    arguments = parser.parse_args(command_arguments(("OUT", "CHECKS")))
    out = arguments.out
    if (out / "runs").exists() or (out.exists() and not out.is_dir()):
        raise UserError(f"OUT={out} is a study or a file; fix: name a folder for the page")
    export_environment()

    return check_card(out, arguments.checks.split())


if __name__ == "__main__":
    run_command(main)
