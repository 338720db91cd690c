"""Damaged files of a study: each is named and moved away, and the study continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.faults.harness import Bench, fault, outcome
from tests.faults.workplace import Workplace

CONTINUES = "named and moved into damaged/; ends at the undisturbed numbers"


def byte_above_0x7f(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:40] + bytes([content[40] | 0x80]) + content[41:])


def brackets(path: Path) -> None:
    path.write_text("[" * 100_000)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def continues(bench: Bench, place: Workplace, damage: Callable[[Path], None], *paths: Path) -> str:
    for path in paths:
        damage(path)
    done = bench.make(place)
    named = all(f"{path.relative_to(place.folder)} cannot be read" in done.stdout for path in paths)
    moved = all((path.parent / "damaged" / path.name).exists() for path in paths)
    same = done.returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(
        named and moved and same, CONTINUES, f"named {named} moved {moved} same {same} {done.stdout[-300:]}"
    )


@fault("a byte above 0x7f in run.json and in config of an interrupted study", CONTINUES)
def byte_in_study(bench: Bench) -> str:
    place = bench.interrupted()
    paths = (place.run_dir() / "run.json", place.study / "config")
    return continues(bench, place, byte_above_0x7f, *paths)


@fault("a FIFO in place of run.json of a finished run", CONTINUES, quick=True)
def fifo_as_record(bench: Bench) -> str:
    place = bench.finished()
    return continues(bench, place, fifo, place.run_dir() / "run.json")


@fault("100,000 brackets in run.json of a finished run", CONTINUES)
def brackets_in_record(bench: Bench) -> str:
    place = bench.finished()
    return continues(bench, place, brackets, place.run_dir() / "run.json")


RESTORED = (
    "an error that names the file and the fix; with the file restored, it ends at the undisturbed numbers"
)


@fault("plan.json of an interrupted study is damaged, then missing", RESTORED)
def damaged_plan(bench: Bench) -> str:
    place = bench.interrupted()
    path, output = place.study / "plan.json", []
    content = path.read_bytes()
    for damage in (brackets, Path.unlink):
        damage(path)
        output.append(bench.make(place))
    named = all("plan.json" in done.stdout and "fix: restore it" in done.stdout for done in output)
    codes = [done.returncode for done in output]
    path.write_bytes(content)
    done = bench.make(place)
    same = done.returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(
        named and codes == [1, 1] and same, RESTORED, f"{named} {codes} {same} {output[0].stdout[-300:]}"
    )


@fault("a flipped digit in the clocks of an interrupted run.json", CONTINUES)
def digit_of_clock(bench: Bench) -> str:
    place = bench.interrupted()
    record = place.run_dir() / "run.json"
    flip_digit(record, b'"train": ')
    done = place.make()
    named = "B0/run.json" in done.stdout and "the run continues from its checkpoint" in done.stdout
    moved = (record.parent / "damaged" / "run.json").exists()
    same = done.returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(named and moved and same, CONTINUES, f"{named} {moved} {same} {done.stdout[-500:]}")


EXCLUDED = "report and verify name the file and exclude the run; after the fix the undisturbed numbers"


def flip_digit(path: Path, before: bytes) -> None:
    """Change the first digit after `before` by its lowest bit."""
    content = bytearray(path.read_bytes())
    content[content.index(before) + len(before)] ^= 1
    path.write_bytes(content)


def excluded(bench: Bench, name: str, before: bytes, message: str, fix: Callable[[Workplace], object]) -> str:
    """Change a digit in a file of a finished run, report, verify, apply the fix and run `make`."""
    place = bench.finished()
    flip_digit(place.run_dir() / name, before)
    output = [place.here(f"scripts.{command}") for command in ("report", "verify")]
    named = all(message in " ".join(done.stdout.split()) and "fix: restore" in done.stdout for done in output)
    counted = "0 of 1 runs counted" in (place.study / "report.md").read_text()
    codes = [done.returncode for done in output]
    fix(place)
    done = bench.make(place)
    same = done.returncode == 0 and place.numbers() == bench.undisturbed()
    verified = place.here("scripts.verify").returncode == 0
    return outcome(
        named and counted and codes == [0, 1] and same and verified,
        EXCLUDED,
        f"{named} {counted} {codes} {same} {verified} {output[0].stdout[-500:]} {output[1].stdout[-500:]}",
    )


@fault("a flipped bit in validation.loss of a finished run.json", EXCLUDED, quick=True)
def loss_of_record(bench: Bench) -> str:
    return excluded(bench, "run.json", b'"loss": ', "run.json was altered: SHA-256 is", lambda place: None)


@fault("a flipped digit in metrics.jsonl of a finished run", EXCLUDED)
def digit_of_metrics(bench: Bench) -> str:
    def fix(place: Workplace) -> None:
        shutil.rmtree(place.run_dir())

    return excluded(bench, "metrics.jsonl", b'"loss": ', "metrics.jsonl: SHA-256 is", fix)


REFUSED = "an error that names the file and the fix; nothing of the study changes"


@fault("a byte above 0x7f in .config, and a FIFO in its place", REFUSED, quick=True)
def damaged_configuration(bench: Bench) -> str:
    place, output = bench.workplace(), []
    for damage in (byte_above_0x7f, fifo):
        damage(place.folder / ".config")
        done = place.here("scripts.study")
        output.append(f"{done.returncode} {done.stdout}")
    good = all(line.startswith("1 error: .config cannot be read") and "; fix: " in line for line in output)
    return outcome(good and not place.study.exists(), REFUSED, f"{output}")


@fault("a flipped digit in plan.json of an interrupted run", REFUSED)
def digit_of_run_plan(bench: Bench) -> str:
    place = bench.interrupted()
    path, steps = place.run_dir() / "plan.json", place.steps()
    content = path.read_bytes()
    flip_digit(path, b'"iterations": ')
    refused = place.make()
    named = (
        refused.returncode == 1 and "B0/plan.json was altered" in refused.stdout and "fix: " in refused.stdout
    )
    unchanged = place.steps() == steps and path.read_bytes() != content
    path.write_bytes(content)
    same = place.make().returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(
        named and unchanged and same, REFUSED, f"{named} {unchanged} {same} {refused.stdout[-300:]}"
    )
