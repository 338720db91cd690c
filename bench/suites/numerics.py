"""Judge `python -m numerics compare` and others by injected faults and clean pairs: `make bench SUITE=numerics`."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.suite import Suite, SuiteResult, SuiteSession
from bench.tables import ResultTable
from gpt2.system.errors import UserError
from tests.numerics.corpus import bisect_faults, clean, monitor_faults, oracle_faults, repeat_faults
from tests.numerics.corpus.corpus import MODES, PINNED, Answer, FaultCorpus, cases, pinned
from tests.numerics.corpus.faults import CHECKSUMS, FAULTS, VALUES


@dataclass(frozen=True)
class FaultGroup:
    """Faults with one judge: (corpus, fault, kind of model, mode of recording) -> its answer.

    modes: of recording, each judged by itself.
    """

    title: str
    faults: Sequence[Any]
    judge: Callable[[FaultCorpus, Any, str, str], Answer]
    modes: tuple[str, ...] = (CHECKSUMS,)

    def table(self, answers: Sequence[Answer]) -> ResultTable:
        """List what was found for each fault; of several modes the right answers, over its models."""
        cells = []
        for fault in self.faults:
            theirs = [answer for answer in answers if answer.fault == fault.name]
            found = [theirs[0].found, "yes" if theirs[0].right else "no"]
            if len(self.modes) > 1:
                by_mode = [[one.right for one in theirs if one.mode == mode] for mode in self.modes]
                found = [f"{sum(rights)} of {len(rights)}" for rights in by_mode]
            expected = fault.answer or fault.verdict
            cells.append((fault.name, getattr(fault, "case", "") or "-", expected, *found))
        if len(self.modes) > 1:
            head = (self.title, "guide", "expected", *self.modes)
            return ResultTable(f"right answers, by what was recorded: {self.title}", head, tuple(cells))
        return ResultTable(self.title, ("fault", "guide", "expected", "found", "right"), tuple(cells))

    def count(self, answers: Sequence[Answer]) -> str:
        """Count the right answers; of several modes the faults that every model's comparison answers rightly."""
        if len(self.modes) == 1:
            return f"{self.title}: {sum(one.right for one in answers)} of {len(answers)}"
        parts = []
        for mode in self.modes:
            here = [answer for answer in answers if answer.mode == mode]
            names = dict.fromkeys(answer.fault for answer in here)
            right = [name for name in names if all(answer.right for answer in here if answer.fault == name)]
            pairs = sum(answer.right for answer in here)
            parts.append(f"{mode} {len(right)} of {len(names)} ({pairs} of {len(here)} comparisons)")
        return f"{self.title} answered rightly by every model: {', '.join(parts)}"


GROUPS = (
    FaultGroup("faults", FAULTS, FaultCorpus.answer, tuple(MODES)),
    FaultGroup("clean pairs", clean.CLEAN, clean.answer, tuple(MODES)),
    FaultGroup(
        "faults that two runs share, named by oracle",
        oracle_faults.ORACLE_FAULTS,
        lambda corpus, fault, kind, mode: oracle_faults.answer(corpus.folder, fault, mode, kind),
        (CHECKSUMS, VALUES),
    ),
    FaultGroup(
        "faults that two runs share, named by the monitor",
        monitor_faults.MONITOR_FAULTS,
        lambda corpus, fault, kind, mode: monitor_faults.answer(corpus.folder, fault),
    ),
    FaultGroup(
        "faults named by replays with fixes or other settings",
        bisect_faults.BISECT_FAULTS,
        lambda corpus, fault, kind, mode: bisect_faults.answer(fault),
    ),
    FaultGroup(
        "faults named by repetition or stress",
        repeat_faults.REPEAT_FAULTS,
        lambda corpus, fault, kind, mode: repeat_faults.answer(corpus.folder, fault),
    ),
)


def run(session: SuiteSession) -> SuiteResult:
    """Judge every fault and every clean pair, with each model and each mode of recording."""
    torch.set_num_threads(1)  # a golden record has one thread
    groups = [
        dataclasses.replace(group, faults=[one for one in group.faults if session.cases in one.name])
        for group in GROUPS
    ]
    if not any(group.faults for group in groups):
        raise UserError(f"no fault and no clean pair has {session.cases!r} in its name")
    answers: dict[str, list[Answer]] = {}
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = FaultCorpus(Path(folder))
        for group in groups:
            found = answers[group.title] = []
            for fault, kind, mode in cases(group.faults, group.modes):
                found.append(group.judge(corpus, fault, kind, mode))
                if not found[-1].right:
                    session.say(f"wrong: {fault.name}, {kind}, {mode}: {found[-1].found}")
            data[group.title] = [dataclasses.asdict(one) for one in found]
            session.save(data)
    lines = {one.line for found in answers.values() for one in found}
    before = {line for line in pinned() if session.cases in line.split("\t")[0]}
    if changed := sorted(lines ^ before):
        for line in changed:
            session.say(f"{'+' if line in lines else '-'} {line}")
        raise UserError(
            f"{len(changed)} lines differ from {PINNED}; fix: undo what changed them, or edit the table"
        )
    shown = [group for group in groups if group.faults]
    return SuiteResult(
        data,
        tuple(group.table(answers[group.title]) for group in shown),
        tuple(group.count(answers[group.title]) for group in shown),
    )


SUITE = Suite(
    "numerics",
    "right answers of `numerics compare` on injected faults, and false alarms on clean pairs",
    run,
    cases="faults and clean pairs with this in their name",
)
