"""What `make bench` measures: shapes of the model, and of each the cases at their micro-batches. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gpt2.system.errors import UserError

PLAIN, BASELINE = "plain", "B"
AGAIN = ":again"  # behind a variant: activations are made again in backward (gpt2.model.recompute)


@dataclass(frozen=True)
class Sizes:
    """The model of a bench."""

    name: str
    layers: int
    heads: int
    width: int
    block_size: int


@dataclass(frozen=True)
class Shape(Sizes):
    """A model, and what of it is measured: (case, micro-batch).

    effective: sequences of an optimizer step, the same in every case; 0: every case makes a step a micro-batch.
    plain_micro: the micro-batch that the plain step has by default, for ratios to it; 0: no such ratio.
    """

    cases: tuple[tuple[str, int], ...]
    effective: int = 0
    plain_micro: int = 0

    def accumulation(self, micro: int) -> int:
        """Micro-batches of an optimizer step."""
        return self.effective // micro if self.effective else 1


VARIANTS = ("B", "RAALL", "RALEARN", "RALEARN:score", "RALEARN:hard", "RALEARN:hard:8")
# 192 is the least number of sequences that 12, 32 and 64 all divide, so that no case makes more optimizer steps a
# sequence than another (12 does not divide the 512 of a study).
SHAPES = {
    "cpu": (
        Shape("124m-t256", 12, 12, 768, 256, ((PLAIN, 2), *((name, 2) for name in VARIANTS)), 0, 2),
        Shape("6x384-t256", 6, 6, 384, 256, ((PLAIN, 12), *((name, 12) for name in VARIANTS)), 0, 12),
    ),
    "cuda": (
        Shape(
            "124m-t1024", 12, 12, 768, 1024,
            ((PLAIN, 12), (PLAIN, 32), ("B", 12), *((name, 32) for name in VARIANTS), ("B" + AGAIN, 32), ("B", 64)),
            192, 12,
        ),
    ),
}  # fmt: skip


def chosen(kind: str, part: str, names: Sequence[str]) -> list[Shape]:
    """The shapes of `kind` whose name contains `part`, with the cases that `names` has; all where it has none.

    A name is a case's, for all its micro-batches ("B"), or has one behind it ("B@32"). UserError where there is no
    such shape or case.
    """
    shapes = [shape for shape in SHAPES[kind] if part in shape.name]
    if not shapes:
        raise no_shape(SHAPES[kind], part)
    labels: dict[str, list[str]] = {}
    for case, micro in dict.fromkeys(pair for shape in shapes for pair in shape.cases):
        labels.setdefault(case, []).append(f"{case}@{micro}")
    for name in names:
        if not any(name == case or name in own for case, own in labels.items()):
            there = ", ".join(f"{case} ({', '.join(own)})" for case, own in labels.items())
            raise UserError(f"no case is called {name!r} here; there are {there}")
    if not names:
        return shapes
    kept = [
        replace(
            shape, cases=tuple(pair for pair in shape.cases if {pair[0], f"{pair[0]}@{pair[1]}"} & {*names})
        )
        for shape in shapes
    ]
    return [shape for shape in kept if shape.cases]


AnyShape = TypeVar("AnyShape", bound=Sizes)


def named(shapes: Sequence[AnyShape], name: str) -> AnyShape:
    """The shape of exactly that name, the first without one; UserError, listing them, where there is none."""
    for shape in shapes:
        if name in ("", shape.name):
            return shape
    raise no_shape(shapes, name)


def no_shape(shapes: Sequence[Sizes], name: str) -> UserError:
    return UserError(
        f"no shape is called {name!r} here; there are {', '.join(shape.name for shape in shapes)}"
    )
