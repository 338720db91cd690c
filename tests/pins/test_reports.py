"""The numbers and words of the reports of three synthetic studies are the pinned ones.

`python -m tests.pins.test_reports --write` stores those of this version, in a commit of its own that says why.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from referee.verdict.design import MARGIN
from runtime import run_record
from study.report.report_data import as_json, build_report
from study.tuned_rates import judged_names, tuning_arms
from tests.checked_files import write_checked
from tests.pins import pinned
from tests.study.sample_records import STEPS, VARIANTS, a_design, a_plan, a_record
from tests.study.test_tuned_report import a_tuned_plan

FILE = "reports.tsv"
SECTIONS = ("runs", "rows", "floor", "verdicts", "earlier", "speeds", "sensitivities", "variance_check",
            "odd_controls", "learned", "validation_tokens", "cut", "tuned")  # fmt: skip
RUN = ("variant", "seed", "status", "used", "cause")  # of a run in the section "runs"
# Their texts are pinned, and no others.
WORDS = ("word", "role", "variant", "status", "cause")
CHOSEN = {"B": "1e-3", "RAALL": "1e-3", "RALEARN": "2e-3"}
RATES = ("1e-3", "2e-3")
Records = dict[tuple[str, int], dict[str, Any]]


def records(runs: list[tuple[str, int]], effect: float) -> Records:
    """Seeds differ by 0.02 nats and runs of one seed by 0.004; RALEARN differs by `effect`."""
    draw = np.random.default_rng(36)
    base = {seed: 4.0 + 0.02 * float(draw.normal()) for seed in sorted({seed for _, seed in runs})}
    return {
        (name, seed): a_record(
            name, seed, base[seed] + 0.004 * float(draw.normal()) + effect * name.startswith("RALEARN")
        )
        for name, seed in runs
    }


def report(folder: Path, found: Records, looks: list[int], **plan: Any) -> dict[str, Any]:
    """Write a study whose plan has these looks, and return its report as report.json has it."""
    for (name, seed), record in found.items():
        run_dir = folder / "runs" / run_record.run_name(name, seed)
        run_dir.mkdir(parents=True)
        write_checked(run_dir / "run.json", record)
    arms = {name for name, _ in found}
    rows = {name: row for name, row in a_plan()["variants"].items() if name in arms}
    classes = {"standard": {"seconds_per_iteration": 0.1}, "learned": {"seconds_per_iteration": 0.12}}
    ratio = {"learned": {"to": "standard", "ratio": 1.2, "low": 1.15, "high": 1.25}}
    steps = {"variants": rows, "classes": classes, "step_time_ratios": ratio} | a_design(looks, MARGIN) | plan
    write_checked(folder / "plan.json", a_plan(**steps))
    content = as_json(build_report(folder))
    return content | {"runs": [{key: run[key] for key in RUN} for run in content["runs"]]}


def studies(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return three studies: as planned; with missing, diverged and cut runs; with tuned learning rates."""
    runs = [(name, seed) for seed in range(5) for name in VARIANTS]
    yield "planned", report(folder / "planned", records(runs[:15], -0.02), [3])
    broken = records(runs, 0.03)
    del broken["RALATE", 1], broken["RALEARN", 3]
    failed = {"status": "failed", "error": "NotFiniteError: loss nan"}
    broken["RALEARN", 4] = run_record.blank("RALEARN4", "RALEARN", 4).to_json() | failed
    broken["RAALL", 3] = a_record("RAALL", 3, 4.2, STEPS // 2) | {
        "schedule": {"iterations": STEPS, "cut": True}
    }
    yield "broken", report(folder / "broken", broken, [3, 5])
    names = judged_names(tuple(CHOSEN), CHOSEN)
    tuning = [(name, seed) for seed in (1000, 1001) for name in tuning_arms(CHOSEN, RATES)]
    judged = [(name, seed) for seed in range(4) for name in names]
    found = records([*tuning, *judged], -0.03)
    design = a_tuned_plan(names, CHOSEN, 4)
    yield "tuned", report(folder / "tuned", {run: found[run] for run in judged}, [4], **design)


def rows_of(name: str, value: Any, key: str = "") -> Iterator[pinned.Row]:
    """Return a row for every number, truth value and word within; texts in a list are the word of one row."""
    if isinstance(value, dict):
        for part, inner in value.items():
            yield from rows_of(f"{name}.{part}", inner, "word" if key in WORDS else part)
    elif isinstance(value, (list, tuple)) and value and all(isinstance(one, str) for one in value):
        yield pinned.Row(name, " ".join(value), ())
    elif isinstance(value, (list, tuple)):
        for place, inner in enumerate(value):
            yield from rows_of(f"{name}.{place}", inner, key)
    elif isinstance(value, str):
        if key in WORDS:
            yield pinned.Row(name, value, ())
    else:
        yield pinned.Row(name, "", (value,))


def all_rows(folder: Path) -> Iterator[pinned.Row]:
    for study, content in studies(folder):
        for section in SECTIONS:
            yield from rows_of(f"{study}.{section}", content.get(section))


def test_reports_of_synthetic_studies_are_the_pinned_ones(tmp_path: Path) -> None:
    found = pinned.differences(FILE, all_rows(tmp_path))
    assert not found, f"{len(found)} rows differ, such as: {found[:5]}"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    with tempfile.TemporaryDirectory() as temporary:
        pinned.write(FILE, all_rows(Path(temporary)))
