"""A case of the corpus: two sides, and the answer that a comparison of their records must give."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from referee.errors import NumericsError
from tests.referee.numerics.corpus.answers import Answer, compared
from tests.referee.numerics.corpus.changes import Parts
from tests.referee.numerics.corpus.models import MAKERS, OURS, STEP, TRANSFORMERS, Optimizer, path_of, record

CHECKSUMS, VALUES, MODULES = "checksums", "values", "modules"
MODES: Mapping[str, Mapping[str, Any]] = {
    CHECKSUMS: {"level": "mix", "summary_mode": "md5"},
    VALUES: {"level": "mix", "task": "tensor"},
    MODULES: {"level": "L0"},
}
BOTH = (OURS, TRANSFORMERS)
NET = "small"  # a model of the case


@dataclass(frozen=True)
class Side:
    """One side of a pair. The other fields are those of models.record."""

    change: Callable[[Parts], None] | None = None  # of the model
    model: Callable[[], nn.Module] | None = None  # of a case of NET
    step: Callable[[nn.Module], Any] = STEP
    optimizer: Optimizer | None = None
    steps: int = 1
    after_backward: Callable[[nn.Module], None] | None = None
    seed: int = 0
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the recorder, after the mode's
    other_process: bool = False
    recorded: Callable[[Path, Mapping[str, Any]], Path] | None = (
        None  # with a mode's settings, instead of models.record
    )

    def record(self, folder: Path, kind: str, mode: str) -> Path:
        """Record the side. Returns the folder of the dump."""
        if self.other_process:
            here = dataclasses.replace(self, other_process=False)
            context, count = multiprocessing.get_context("spawn"), torch.get_num_threads()
            with ProcessPoolExecutor(1, context, torch.set_num_threads, (count,)) as pool:
                return pool.submit(here.record, folder, kind, mode).result()
        if self.recorded:
            return self.recorded(folder, MODES[mode])
        torch.manual_seed(0)
        model = self.model() if self.model else MAKERS[kind](self.seed)
        if self.change:
            self.change(Parts(kind, model))
        torch.manual_seed(0)
        settings = {**MODES[mode], **self.settings}
        return record(
            folder,
            model,
            self.step,
            self.around(),
            self.optimizer,
            self.steps,
            self.after_backward,
            **settings,
        )


@dataclass(frozen=True)
class Case:
    """A planted fault, or a clean pair: a verdict other than `diverges`."""

    name: str
    modules: str = ""  # parts of models.PATHS or paths, one of which must be named, as "gelu|mlp"; empty: any
    target: Side = field(default_factory=Side)
    golden: Side = field(default_factory=Side)
    evidence: str = (
        ""  # classes of referee/numerics/rows.py, one of which must be named, as "data|setting"; empty: any
    )
    verdict: str = "diverges"  # several with "|", or one of a clean pair: "equal" or "rounding"
    direction: str = "forward"  # empty: any
    kinds: tuple[str, ...] = BOTH  # of models
    hidden: tuple[str, ...] = ()  # modes that do not show it
    guide: str = ""  # section of the guide with such a case
    call: str = ""  # a part of the name of the first row, or of its step and rank
    names: Mapping[str, str] | None = field(default=None, hash=False)  # {target: golden}, of modules
    ranks: str = "equal"  # "merged": the target's ranks share the work of one golden rank

    def is_right(self, answer: Answer, kind: str) -> bool:
        if not self.verdict.endswith("diverges"):
            return answer.verdict.startswith(("equal", self.verdict))
        modules = [path_of(part, kind) for part in self.modules.split("|")]
        return (
            answer.verdict in self.verdict.split("|")
            and (self.direction in ("", answer.direction) or answer.verdict != "diverges")
            and (not self.evidence or answer.evidence in self.evidence.split("|"))
            and (not self.modules or answer.module in modules)
            and self.call in answer.call
        )


class Corpus:
    """Records of cases in a folder. The golden records are shared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.goldens: dict[Any, Path] = {}

    def golden(self, side: Side, kind: str, mode: str) -> Path:
        """Return the record of a side; it is recorded once."""
        key = side, kind, mode
        if key not in self.goldens:
            self.goldens[key] = side.record(self.folder, kind, mode)
        return self.goldens[key]

    def answer(self, case: Case, kind: str, mode: str) -> Answer:
        """Record both sides of a case and compare."""
        golden = self.golden(case.golden, kind, mode)
        try:
            target = case.target.record(self.folder, kind, mode)
        except NumericsError as error:
            return Answer("refused", call=str(error))
        return compared(target, golden, case.names, case.ranks)


@dataclass(frozen=True)
class RunFault:
    """A fault that no comparison of two runs shows."""

    name: str
    tool: str
    expected: str
    answer: Callable[[Corpus], tuple[bool, str]]  # whether the tool names what is expected, and what it names
    guide: str = ""


def agree(corpus: Corpus, side: Side, mode: str = CHECKSUMS) -> bool:
    """Return whether two records of one side are no divergence: their comparison does not show the fault."""
    return corpus.answer(Case("", target=side, golden=side), OURS, mode).verdict != "diverges"
