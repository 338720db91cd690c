"""Judge `python -m numerics compare` and `oracle` by injected faults and clean pairs: `make bench SUITE=numerics`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.numerics import bisect_faults, clean, monitor_faults, msprobe, oracle_faults
from bench.numerics.corpus import MODES, Answer, Corpus, cases
from bench.numerics.faults import FAULTS, Fault
from bench.numerics.oracle_faults import OracleFault
from bench.suite import Session, Suite, SuiteResult
from bench.tables import ResultTable
from gpt2.system.errors import UserError

SHARED = "faults that two runs share, named by oracle"
BISECTED = "faults named by replays with fixes or other settings"
MONITORED = "faults that two runs share, named by the monitor"
Judge = Callable[[Corpus, Fault, str, str], Answer]


def run(session: Session) -> SuiteResult:
    """Judge every fault and every clean pair, with each model and each mode of recording."""
    torch.set_num_threads(1)  # a golden record has one thread
    parts: tuple[tuple[str, Sequence[Fault], Judge], ...] = (
        ("faults", _named(FAULTS, session.cases), Corpus.answer),
        ("clean pairs", _named(clean.CLEAN, session.cases), clean.answer),
    )
    shared = [fault for fault in oracle_faults.ORACLE_FAULTS if session.cases in fault.name]
    bisected = [fault for fault in bisect_faults.BISECT_FAULTS if session.cases in fault.name]
    monitored = [fault for fault in monitor_faults.MONITOR_FAULTS if session.cases in fault.name]
    if not (shared or bisected or monitored) and not any(listed for _, listed, _ in parts):
        raise UserError(f"no fault and no clean pair has {session.cases!r} in its name")
    answers: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Corpus(Path(folder))
        for title, listed, judge in parts:
            answers[title] = []
            for fault, kind, mode in cases(listed, MODES):
                found = judge(corpus, fault, kind, mode)
                answers[title].append(found)
                if not found.right:
                    session.say(f"wrong: {found.fault}, {kind}, {mode}: {found.found}")
            session.save(
                {name: [dataclasses.asdict(one) for one in found] for name, found in answers.items()}
            )
        if shared:
            answers[SHARED] = [
                oracle_faults.answer(Path(folder), fault, mode) for fault in shared for mode in fault.modes
            ]
        if monitored:
            answers[MONITORED] = [monitor_faults.answer(Path(folder), fault) for fault in monitored]
    found_by_replays = [bisect_faults.answer(fault) for fault in bisected]
    if bisected:
        answers[BISECTED] = found_by_replays
    data = {name: [dataclasses.asdict(one) for one in found] for name, found in answers.items()}
    tables = [_table(title, listed, answers[title]) for title, listed, _ in parts if listed]
    tables += [_table(SHARED, shared, answers[SHARED])] if shared else []
    alone: dict[str, Sequence[Any]] = {BISECTED: bisected, MONITORED: monitored}
    tables += [_found_table(name, alone[name], answers[name]) for name in alone if alone[name]]
    lines = [_count(name, found) for name, found in answers.items() if name not in alone]
    for name in (name for name in alone if alone[name]):
        lines.append(f"{name}: {sum(one.right for one in answers[name])} of {len(answers[name])}")
    return SuiteResult(data, tuple(tables), tuple(lines))


def _found_table(title: str, faults: Sequence[Any], answers: Sequence[Answer]) -> ResultTable:
    """List what was found for each fault, by its `name` and expected `answer`."""
    rows = [
        (fault.name, fault.answer, found.found, "yes" if found.right else "no")
        for fault, found in zip(faults, answers, strict=True)
    ]
    return ResultTable(title, ("fault", "expected", "found", "right"), tuple(rows), ())


def _named(faults: Sequence[Fault], part: str) -> list[Fault]:
    return [fault for fault in faults if part in fault.name]


def _table(title: str, faults: Sequence[Fault | OracleFault], answers: Sequence[Answer]) -> ResultTable:
    """List the right answers of each fault by mode, over the models that it applies to."""
    cells = []
    for fault in faults:
        counts = []
        for mode in MODES:
            mine = [answer.right for answer in answers if (answer.fault, answer.mode) == (fault.name, mode)]
            counts.append(f"{sum(mine)} of {len(mine)}")
        theirs = [answer for answer in answers if answer.fault == fault.name]
        if title != SHARED and msprobe.program():
            flagged = sum(bool(answer.msprobe) for answer in theirs)
            right = sum(answer.msprobe_right for answer in theirs)
            refused = sum(answer.msprobe_refused for answer in theirs)
            counts.append(f"{flagged}, {right} of {len(theirs)}{f', {refused} refused' if refused else ''}")
        expected = fault.answer or (fault.verdict if isinstance(fault, Fault) else "")
        cells.append((fault.name, fault.case or "-", expected, *counts))
    flags = ["msProbe: flagged, right"] if msprobe.program() and title != SHARED else []
    head = (title, "guide", "expected", *MODES, *flags)
    return ResultTable(f"right answers, by what was recorded: {title}", head, tuple(cells), ())


def _count(title: str, answers: Sequence[Answer]) -> str:
    """Count the faults that every model's comparison answers rightly, by mode."""
    parts = []
    for mode in MODES:
        here = [answer for answer in answers if answer.mode == mode]
        names = dict.fromkeys(answer.fault for answer in here)
        right = [name for name in names if all(answer.right for answer in here if answer.fault == name)]
        pairs = sum(answer.right for answer in here)
        parts.append(f"{mode} {len(right)} of {len(names)} ({pairs} of {len(here)} comparisons)")
        if msprobe.program() and title != SHARED:
            parts.append(f"msProbe {sum(answer.msprobe_right for answer in here)} of {len(here)} comparisons")
    return f"{title} answered rightly by every model: {', '.join(parts)}"


SUITE = Suite(
    "numerics",
    "right answers of `numerics compare` on injected faults, and false alarms on clean pairs",
    run,
    cases="faults and clean pairs with this in their name",
)
