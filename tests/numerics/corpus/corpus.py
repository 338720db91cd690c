"""Record each fault and each clean pair, compare, and judge the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from numerics.compare.run import Comparison, compare_records
from tests.numerics.corpus.changes import Parts
from tests.numerics.corpus.faults import CHECKSUMS, MODULES, VALUES, PairSide, PlantedFault
from tests.numerics.corpus.models import MAKERS, OURS, PATHS, record

MODES: Mapping[str, Mapping[str, Any]] = {
    CHECKSUMS: {"level": "mix", "summary_mode": "md5"},
    VALUES: {"level": "mix", "task": "tensor"},
    MODULES: {"level": "L0"},
}


PINNED = Path(__file__).parents[3] / "tests/pins/numerics.tsv"


@dataclass(frozen=True)
class Answer:
    """The answer of the comparison, and whether it is right.

    named: the row or verdict alone. growth: of a clean pair, the largest error relative to what explains it.
    """

    fault: str
    kind: str
    mode: str
    found: str
    right: bool
    named: str = ""
    growth: float = 0.0

    @property
    def line(self) -> str:
        """Return the line of PINNED."""
        return "\t".join((self.fault, self.kind, self.mode, "right" if self.right else "wrong", self.named))


class FaultCorpus:
    """Records of faults in a folder. The golden records are shared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.goldens: dict[Any, Path] = {}

    def answer(self, fault: PlantedFault, kind: str, mode: str) -> Answer:
        """Inject one fault, compare and judge."""
        golden = self.golden(fault.golden, kind, mode)
        comparison = compare_records(record_run(self.folder, fault.target, kind, mode), golden)
        right = is_right(fault, kind, comparison)
        return Answer(fault.name, kind, mode, found(comparison), right, named(comparison))

    def golden(self, run: PairSide, kind: str, mode: str) -> Path:
        """Return the record of a run; it is recorded once."""
        key = kind, mode, run
        if key not in self.goldens:
            self.goldens[key] = record_run(self.folder, run, kind, mode)
        return self.goldens[key]


def record_run(folder: Path, run: PairSide, kind: str, mode: str) -> Path:
    """Record one side of a pair. Returns the folder of the dump."""
    model = MAKERS[kind](run.seed)
    if run.change:
        run.change(Parts(kind, model))
    torch.manual_seed(0)
    return record(
        folder,
        model,
        run.step,
        run.around(),
        optimizer=run.optimizer,
        steps=run.steps,
        after_backward=run.after_backward,
        **{**MODES[mode], **run.settings},
    )


def found(comparison: Comparison) -> str:
    """Return what the comparison named, in one line."""
    if comparison.first is None:
        name = comparison.first_unequal
        return f"{comparison.verdict}, first unequal: {name}" if name else comparison.verdict
    step, first = comparison.first
    return f"{first.name} ({first.direction}, {first.cause}) in {step.place}: {first.why}"


def pinned() -> set[str]:
    """Return the lines of PINNED, without its head."""
    return set(PINNED.read_text().splitlines()[1:])


def named(comparison: Comparison) -> str:
    """Return the row that the comparison named, or its verdict without one."""
    if comparison.first is None:
        return comparison.verdict
    step, first = comparison.first
    return f"{first.name}, {first.direction}, {step.place}"


def is_right(fault: PlantedFault, kind: str, comparison: Comparison) -> bool:
    """Return whether the first divergence is the fault's module, or its cause is the fault's."""
    if comparison.verdict != fault.verdict:
        return False
    paths = [PATHS[kind][name] for name in fault.expected.split("|")] if fault.expected else []
    if comparison.first is None:
        return any(path in (comparison.first_unequal or "") for path in paths)
    first = comparison.first[1]
    if fault.direction and first.direction != fault.direction:
        return False
    if fault.causes and first.cause not in fault.causes:
        return False
    if fault.groups and f"groups: {fault.groups}" not in first.why:
        return False
    if fault.named:
        return any(path in first.name for path in paths)
    if not paths:
        return True
    return first.module in paths or any(f"{path} shares it" in first.why for path in paths)


def cases(faults: Iterable[Any], modes: Iterable[str]) -> list[tuple[Any, str, str]]:
    """Return every fault with each model that it applies to (ours by default) and each mode."""
    listed = list(modes)
    return [
        (fault, kind, mode)
        for fault in faults
        for kind in getattr(fault, "kinds", (OURS,))
        for mode in listed
    ]
