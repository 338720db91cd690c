"""Judge `python -m numerics compare` and `oracle` by injected faults and clean pairs: `make bench SUITE=numerics`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.numerics import bisect_faults, clean, monitor_faults, msprobe, oracle_faults, repeat_faults
from bench.numerics.corpus import MODES, Answer, FaultCorpus, cases
from bench.numerics.faults import FAULTS, PlantedFault
from bench.numerics.oracle_faults import OracleFault
from bench.suite import Suite, SuiteResult, SuiteSession
from bench.tables import ResultTable
from gpt2.system.errors import UserError

SHARED = "faults that two runs share, named by oracle"
Judge = Callable[[FaultCorpus, PlantedFault, str, str], Answer]
# Faults that a comparison of two runs does not name, by what names them, with their judge.
ALONE: dict[str, tuple[Sequence[Any], Callable[[Path, Any], Answer]]] = {
    "faults that two runs share, named by the monitor": (
        monitor_faults.MONITOR_FAULTS,
        monitor_faults.answer,
    ),
    "faults named by replays with fixes or other settings": (
        bisect_faults.BISECT_FAULTS,
        lambda folder, fault: bisect_faults.answer(fault),
    ),
    "faults named by repetition or stress": (repeat_faults.REPEAT_FAULTS, repeat_faults.answer),
}


def run(session: SuiteSession) -> SuiteResult:
    """Judge every fault and every clean pair, with each model and each mode of recording."""
    torch.set_num_threads(1)  # a golden record has one thread
    parts: tuple[tuple[str, Sequence[PlantedFault], Judge], ...] = (
        ("faults", _named(FAULTS, session.cases), FaultCorpus.answer),
        ("clean pairs", _named(clean.CLEAN, session.cases), clean.answer),
    )
    shared = [fault for fault in oracle_faults.ORACLE_FAULTS if session.cases in fault.name]
    alone = {
        title: [fault for fault in faults if session.cases in fault.name]
        for title, (faults, _) in ALONE.items()
    }
    if not shared and not any(alone.values()) and not any(listed for _, listed, _ in parts):
        raise UserError(f"no fault and no clean pair has {session.cases!r} in its name")
    answers: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = FaultCorpus(Path(folder))
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
        lines = [_count(name, found) for name, found in answers.items()]
        for title, faults in alone.items():
            if faults:
                answers[title] = [ALONE[title][1](Path(folder), fault) for fault in faults]
                lines.append(f"{title}: {sum(one.right for one in answers[title])} of {len(faults)}")
    data = {name: [dataclasses.asdict(one) for one in found] for name, found in answers.items()}
    tables = [_table(title, listed, answers[title]) for title, listed, _ in parts if listed]
    tables += [_table(SHARED, shared, answers[SHARED])] if shared else []
    tables += [_alone_table(title, faults, answers[title]) for title, faults in alone.items() if faults]
    return SuiteResult(data, tuple(tables), tuple(lines))


def _alone_table(title: str, faults: Sequence[Any], answers: Sequence[Answer]) -> ResultTable:
    rows = [
        (
            fault.name,
            getattr(fault, "case", "") or "-",
            fault.answer,
            found.found,
            "yes" if found.right else "no",
        )
        for fault, found in zip(faults, answers, strict=True)
    ]
    return ResultTable(title, ("fault", "guide", "expected", "found", "right"), tuple(rows), ())


def _named(faults: Sequence[PlantedFault], part: str) -> list[PlantedFault]:
    return [fault for fault in faults if part in fault.name]


def _table(
    title: str, faults: Sequence[PlantedFault | OracleFault], answers: Sequence[Answer]
) -> ResultTable:
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
        expected = fault.answer or (fault.verdict if isinstance(fault, PlantedFault) else "")
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
