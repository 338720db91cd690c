"""Lengths of a study whose runs were extended: names of the saved results, and the length that a report shows.

`make extend` saves the results of N iterations beside those of the longer run: run-N.json, metrics-N.jsonl, ...,
checkpoint-N/, and plan-N.json of the study. A report never mixes lengths.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt2.artifacts import run_record
from study.records import plan_file
from study.records.plan_file import PlanRow

ENOUGH_SEEDS = 3  # complete seeds from which a report shows the longer runs


@dataclass(frozen=True)
class Length:
    """One length of a study. plan: the name of its plan file. text: its iterations."""

    rows: Mapping[str, PlanRow]
    plan: str
    text: str

    def record(self, run_dir: Path) -> tuple[run_record.RunRecord, int | None]:
        """Return the run's record at this length and the count under which it is saved, or run.json and None.

        Raises RecordError if run.json cannot be read.
        """
        record = run_record.load(run_dir)
        row = self.rows.get(record.variant)
        if row and (run_dir / f"run-{row.iterations}.json").exists():
            return run_record.load(run_dir, f"run-{row.iterations}.json"), row.iterations
        return record, None

    def has_finished(self, record: run_record.RunRecord) -> bool:
        """Return whether the record is of a finished run of this length."""
        row = self.rows.get(record.variant)
        return record.status == "finished" and row is not None and record.planned_iterations == row.iterations


@dataclass(frozen=True)
class Shown:
    """The length that a report shows (None: the study was not extended), and a sentence if not every seed has it."""

    length: Length | None = None
    note: str = ""


def saved_name(path: Path, count: int) -> Path:
    """The name under which a file or folder is saved at `count` iterations: metrics-10.jsonl, checkpoint-10."""
    return path.with_name(f"{path.stem}-{count}{path.suffix}")


def saved_counts(folder: Path, stem: str) -> list[int]:
    """Every N of <stem>-N.json in the folder, ascending."""
    found = (re.fullmatch(rf"{stem}-([0-9]+)\.json", path.name) for path in folder.glob(f"{stem}-*.json"))
    return sorted(int(match[1]) for match in found if match)


def shown_length(study_dir: Path) -> Shown:
    """Choose the longest length that min(ENOUGH_SEEDS, all) seeds have completed."""
    names = [plan_file.FILE, *(f"plan-{count}.json" for count in reversed(saved_counts(study_dir, "plan")))]
    lengths = [length for name in names if (length := _read(study_dir, name))]
    if len(lengths) < 2:
        return Shown()
    finished = [_finished(study_dir, length) for length in lengths]
    for (length, now), (shorter, before) in itertools.pairwise(zip(lengths, finished, strict=True)):
        complete = [seed for seed, variants in before.items() if variants <= now.get(seed, set())]
        enough = min(ENOUGH_SEEDS, len(before))
        if len(complete) == len(before):
            return Shown(length)
        progress = (
            f"{len(complete)} of {len(before)} seeds have finished the extension from {shorter.text} to"
        )
        if len(complete) >= enough:
            return Shown(
                length,
                f"{progress} {length.text} iterations. The results of the other seeds at {shorter.text} iterations "
                "are saved in run-N.json and are not shown.",
            )
        if length is lengths[0]:
            note = (
                f"{progress} {length.text} iterations. This report shows all runs at {shorter.text} iterations; "
                f"the longer runs follow when {enough} {'seed has' if enough == 1 else 'seeds have'} finished."
            )
    return Shown(lengths[-1], note)


def _read(study_dir: Path, name: str) -> Length | None:
    """The length of a plan file; None if it cannot be read."""
    plan = plan_file.read_valid(study_dir, name)
    return Length(plan.variants, name, plan.counts) if plan else None


def _finished(study_dir: Path, length: Length) -> dict[int, set[str]]:
    """Seed -> variants whose runs have finished this length."""
    found: dict[int, set[str]] = {}
    for folder in sorted((study_dir / "runs").glob("*/")):
        try:
            record, _ = length.record(folder)
        except run_record.RecordError:
            continue
        if length.has_finished(record):
            found.setdefault(record.seed, set()).add(record.variant)
    return found
