"""Define the model shapes of the benches and the cases measured on each. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gpt2.system.errors import UserError

PLAIN, BASELINE = "plain", "B"
BLOCK_STEPS = 8  # steps from one synchronisation of a GPU to the next


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model."""

    name: str
    layers: int
    heads: int
    width: int
    block_size: int


@dataclass(frozen=True)
class Shape(Sizes):
    """A model and its cases: (case, micro-batch).

    effective: sequences in one optimizer step, the same for every case; 0: one micro-batch.
    plain_micro: default micro-batch of the plain case (bench.reference_gpt), for ratios to it; 0: no such ratio.
    """

    cases: tuple[tuple[str, int], ...] = ()
    effective: int = 0
    plain_micro: int = 0

    def accumulation(self, micro: int) -> int:
        """Count the micro-batches in one optimizer step."""
        return self.effective // micro if self.effective else 1


VARIANTS = ("B", "RAALL", "RALEARN", "RALEARN:score", "RALEARN:hard", "RALEARN:hard:8")
# 192 is the smallest number of sequences that 12, 32 and 64 divide, so that every case makes the same number of
# optimizer steps for a sequence. (12 does not divide the 512 sequences of a study.)
SHAPES = {
    "cpu": (
        Shape("124m-t256", 12, 12, 768, 256, ((PLAIN, 2), *((name, 2) for name in VARIANTS)), 0, 2),
        Shape("6x384-t256", 6, 6, 384, 256, ((PLAIN, 12), *((name, 12) for name in VARIANTS)), 0, 12),
    ),
    "cuda": (
        Shape(
            "124m-t1024", 12, 12, 768, 1024,
            ((PLAIN, 12), (PLAIN, 32), ("B", 12), *((name, 32) for name in VARIANTS), ("B", 64)),
            192, 12,
        ),
    ),
}  # fmt: skip


AnyShape = TypeVar("AnyShape", bound=Sizes)


def find_shapes(shapes: Sequence[AnyShape], part: str) -> list[AnyShape]:
    """Return the shapes whose name contains `part`. UserError if there is none."""
    found = [shape for shape in shapes if part in shape.name]
    if not found:
        raise UserError(f"unknown shape {part!r}; shapes: {', '.join(shape.name for shape in shapes)}")
    return found


def select_cases(shapes: Sequence[Shape], names: Sequence[str]) -> list[Shape]:
    """Return the shapes with only the cases in `names`, without shapes that have none of them.

    names: a case at all its micro-batches ("B") or at one ("B@32"); empty: all cases. Either may have options of the
    step ("B+bf16@32", see bench.step_options). UserError for an unknown case.
    """
    labels: dict[str, list[str]] = {}
    for case, micro in dict.fromkeys(pair for shape in shapes for pair in shape.cases):
        labels.setdefault(case, []).append(f"{case}@{micro}")
    wanted: list[tuple[str, str]] = []  # name without options, and options
    for name in names or labels:
        _, plus, options = name.partition("@")[0].partition("+")
        wanted.append((name.replace(plus + options, "", 1), plus + options))
        if not any(wanted[-1][0] in (case, *at_micro) for case, at_micro in labels.items()):
            known = ", ".join(f"{case} ({', '.join(at_micro)})" for case, at_micro in labels.items())
            raise UserError(f"unknown case {name!r}; cases: {known}")
    selected = []
    for shape in shapes:
        pairs = [(case + options, micro) for case, micro in shape.cases for name, options in wanted
                 if name in (case, f"{case}@{micro}")]  # fmt: skip
        selected += [replace(shape, cases=tuple(dict.fromkeys(pairs)))] if pairs else []
    return selected
