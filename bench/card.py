"""`make card [OUT=folder] [CHECKS="second"]`: check this card, the most informative lines first; write card.jsonl."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.card_checks import (
    DIFFERS,
    CardCheck,
    CheckedDevice,
    NotRunError,
    Question,
    gate_checks,
    judge,
    not_run,
)
from bench.card_kernels import fact_checks, kernel_checks, other_shapes
from bench.card_speed import (
    default_micro_checks,
    evaluation_checks,
    head_checks,
    plain_checks,
    profile_checks,
    speed_checks,
)
from bench.card_studies import (
    budget_checks,
    learned_checks,
    memory_checks,
    out_of_memory_checks,
    repeat_checks,
    study_checks,
)
from runtime.errors import UserError, one_line, run_command
from runtime.files import open_append
from runtime.provenance import environment_record, revision
from runtime.resolved_target import ResolvedTarget, export_environment, resolve, target_record
from runtime.settings import ANY_TARGET
from study.make_arguments import command_arguments

QUESTIONS: dict[str, Question] = {
    "facts": fact_checks,
    "speed": speed_checks,
    "kernels": kernel_checks,
    "gates": gate_checks,
    "plain": plain_checks,
    "study": study_checks,
    "memory": memory_checks,
    "head": head_checks,
    "evaluation": evaluation_checks,
    "out-of-memory": out_of_memory_checks,
    "budget": budget_checks,
    "learned": learned_checks,
    "profile": profile_checks,
    "shapes": other_shapes,
    "default-micro": default_micro_checks,
    "repeat": repeat_checks,
}
PARTS = {
    "first": ("facts", "speed", "kernels", "gates", "plain", "study", "memory"),
    "second": ("head", "evaluation", "out-of-memory", "budget", "learned"),
    "third": ("profile", "shapes", "default-micro", "repeat"),
}


class CardLog:
    """The lines of one card in `card.jsonl`, those of earlier commands first; the last line of a name counts.

    UserError where the folder has lines of another card or torch.
    """

    def __init__(self, out: Path, resolved: ResolvedTarget) -> None:
        self.checks: dict[str, CardCheck] = {}
        self.values: dict[str, float] = {}
        self._began, self._known = time.monotonic(), 0.0  # seconds of this command until the last line
        code = revision()
        place = {"device": resolved.device_name, "torch": resolved.torch}
        path = out / "card.jsonl"
        self._read(path, place)
        out.mkdir(parents=True, exist_ok=True)
        self._file = open_append(path)
        self._file.write("\n")  # ends a line that was cut
        self._write(
            {
                "schema": 2,
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                **place,
                "commit": code.commit,
                "dirty": code.dirty,
                "target": target_record(resolved),
                "environment": environment_record().to_json(),
            }
        )

    def _read(self, path: Path, place: dict[str, Any]) -> None:
        for text in path.read_text().splitlines() if path.is_file() else ():
            try:
                line = json.loads(text)
            except ValueError:  # empty, or a command was killed while it wrote this line
                continue
            if "schema" not in line:
                self._keep(CardCheck(**line))
            elif any(line.get(name) != value for name, value in place.items()):
                other = ", ".join(f"{line.get(name)}" for name in place)
                raise UserError(f"{path} has lines of {other}; fix: OUT= another folder")

    def _keep(self, check: CardCheck) -> None:
        self.checks.pop(check.name, None)
        self.checks[check.name] = check
        if check.value is not None:
            self.values[check.name] = check.value

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def add(self, check: CardCheck) -> CardCheck:
        """Print and write a line, with the seconds since the line before."""
        before, self._known = self._known, time.monotonic() - self._began
        check = dataclasses.replace(check, seconds=round(self._known - before, 1))
        self._keep(check)
        self._write(dataclasses.asdict(check))
        print(check.line, flush=True)
        return check


def check_card(out: Path, chosen: Sequence[str]) -> int:
    """Answer the questions of parts, or single ones, in turn. The exit status is 1 where a line differs."""
    known = {**PARTS} | {name: (name,) for name in QUESTIONS}
    unknown = [word for word in chosen if word not in known]
    if unknown:
        raise UserError(f"unknown CHECKS: {' '.join(unknown)}; fix: use words of: {' '.join(known)}")
    resolved = resolve(ANY_TARGET)
    log = CardLog(out, resolved)
    print(f"{resolved.device_name}, {resolved.dtype}, torch {resolved.torch}", flush=True)
    card = CheckedDevice(resolved, out / "studies", log.values)
    added: list[CardCheck] = []
    for name in dict.fromkeys(name for word in chosen for name in known[word]):
        try:
            for check in QUESTIONS[name](card):
                added.append(log.add(check))
        except NotRunError as reason:
            added.append(log.add(not_run(f"{name}: the rest", "lines", f"{reason}")))
        except Exception as error:  # the other questions are independent
            added.append(
                log.add(
                    judge(f"{name}: the rest", "lines", f"{type(error).__name__}: {one_line(error)}", False)
                )
            )
    different = [check.line for check in added if check.verdict == DIFFERS]
    print("\nLines that differ:" if different else "\nNo line differs.", *different, sep="\n")
    print(f"To send back, as an issue: {out / 'card.jsonl'}")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make card", description="Check kernels, gradients, studies, memory and speed of this card."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results/card"), help="folder of all commands of a card"
    )
    parser.add_argument(
        "--checks",
        default="",
        help=f"a part ({', '.join(PARTS)}; default: first), or questions: {' '.join(QUESTIONS)}",
    )
    arguments = parser.parse_args(command_arguments(("OUT", "CHECKS")))
    out = arguments.out
    if (out / "runs").exists() or (out.exists() and not out.is_dir()):
        raise UserError(f"OUT={out} is a study or a file; fix: name a folder for the lines")
    export_environment()
    return check_card(out, arguments.checks.split() or ["first"])


if __name__ == "__main__":
    run_command(main)
