"""Define the model shapes of the benches and the cases measured on each. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ra.arms import known_arm
from runtime.errors import UserError

PLAIN, BASELINE, LEARNED = "plain", "B", "RALEARN"
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
    """A model and its cases. A case is "plain" (bench.reference_gpt) or an arm (ra.arms)."""

    cases: tuple[tuple[str, int], ...] = ()  # name and micro-batch
    effective: int = 0  # sequences in one optimizer step of every case; 0: one micro-batch
    plain_micro: int = 0  # default micro-batch of the plain case, for ratios to it; 0: no such ratio

    def accumulation(self, micro: int) -> int:
        """Count the micro-batches in one optimizer step."""
        return self.effective // micro if self.effective else 1


VARIANTS = (BASELINE, "RAALL", LEARNED)
# 192 is the smallest number of sequences that 12, 32 and 64 divide, so that every case makes the same number of
# optimizer steps for a sequence. (12 does not divide the 512 sequences of a study.)
SHAPES = {
    "cpu": (
        Shape("124m-t256", 12, 12, 768, 256, ((PLAIN, 2), *((name, 2) for name in VARIANTS)), 0, 2),
        Shape("6x384-t256", 6, 6, 384, 256, ((PLAIN, 12), *((name, 12) for name in VARIANTS)), 0, 12),
    ),
    "card": (
        Shape(
            "124m-t1024", 12, 12, 768, 1024,
            ((PLAIN, 12), (PLAIN, 32), (BASELINE, 12), *((name, 32) for name in VARIANTS), (BASELINE, 64)),
            192, 12,
        ),
    ),
}  # fmt: skip


AnyShape = TypeVar("AnyShape", bound=Sizes)


def find_shapes(shapes: Sequence[AnyShape], part: str) -> list[AnyShape]:
    """Return the shapes whose name contains `part`. UserError if there is none."""
    found = [shape for shape in shapes if part in shape.name]
    if not found:
        raise UserError(
            f"unknown shape {part!r}; fix: SHAPE= one of {', '.join(shape.name for shape in shapes)}"
        )
    return found


def select_cases(shape: Shape, names: Sequence[str]) -> Shape:
    """Return the shape with these cases; none: all of its own.

    names: a case at the micro-batches that the shape lists for it ("B"), else at those of B; or at a given one
    ("B@32"). UserError for an unknown case, or a micro-batch that does not divide the optimizer step.
    """
    chosen: list[tuple[str, int]] = []
    for name in names:
        case, at, text = name.partition("@")
        if case != PLAIN:
            known_arm(case)  # raises for an unknown arm
        listed = [micro for known, micro in shape.cases if known == case]
        micros = listed or [micro for known, micro in shape.cases if known == BASELINE]
        if at:
            micros = [int(text) if text.isdecimal() else 0]
        for micro in micros:
            if micro < 1 or shape.effective % micro:
                whole = f" and divides {shape.effective}" if shape.effective else ""
                raise UserError(
                    f"case {name!r} has no valid micro-batch; fix: CASES={case}@N, where N is at least 1{whole}"
                )
            chosen.append((case, micro))
    return replace(shape, cases=tuple(dict.fromkeys(chosen))) if names else shape
