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


def select_shapes(kind: str, part: str, names: Sequence[str]) -> list[Shape]:
    """Return the shapes of `kind` whose name contains `part`, with only the cases in `names`.

    names: a case at all its micro-batches ("B") or at one ("B@32"); empty: all cases.
    Raises UserError for an unknown shape or case.
    """
    shapes = [shape for shape in SHAPES[kind] if part in shape.name]
    if not shapes:
        raise unknown_shape(SHAPES[kind], part)
    labels: dict[str, list[str]] = {}
    for case, micro in dict.fromkeys(pair for shape in shapes for pair in shape.cases):
        labels.setdefault(case, []).append(f"{case}@{micro}")
    for name in names:
        if not any(name in (case, *at_micro) for case, at_micro in labels.items()):
            known = ", ".join(f"{case} ({', '.join(at_micro)})" for case, at_micro in labels.items())
            raise UserError(f"unknown case {name!r}; cases: {known}")

    def chosen(case: str, micro: int) -> bool:
        return not names or case in names or f"{case}@{micro}" in names

    selected = [
        replace(shape, cases=tuple(pair for pair in shape.cases if chosen(*pair))) for shape in shapes
    ]
    return [shape for shape in selected if shape.cases]


AnyShape = TypeVar("AnyShape", bound=Sizes)


def find_shape(shapes: Sequence[AnyShape], name: str) -> AnyShape:
    """Return the shape with exactly this name; the first shape for an empty name. UserError if there is none."""
    for shape in shapes:
        if name in ("", shape.name):
            return shape
    raise unknown_shape(shapes, name)


def unknown_shape(shapes: Sequence[Sizes], name: str) -> UserError:
    return UserError(f"unknown shape {name!r}; shapes: {', '.join(shape.name for shape in shapes)}")
