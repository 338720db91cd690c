"""Define the model shapes of the benches and the cases measured on each. Needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ra.arms import parse_arm
from ra.names import VariantError
from runtime.errors import UserError

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
    "card": (
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

    names: a case at all its micro-batches ("B") or at one ("B@32"); empty: all cases. Another arm takes the
    micro-batches of B. Either may have options of the step ("B+bf16@32", see bench.case_step) and modifiers of an
    arm ("B+NORM=rms@32"). UserError for an unknown case or modifier.
    """
    labels: dict[str, list[str]] = {}
    for listed, size in dict.fromkeys(pair for shape in shapes for pair in shape.cases):
        labels.setdefault(listed, []).append(f"{listed}@{size}")
    wanted: list[
        tuple[str, str, str]
    ] = []  # case without options, the listed case of its micro-batches, and options
    for name in names or labels:
        _, plus, options = name.partition("@")[0].partition("+")
        bare = name.replace(plus + options, "", 1)
        listed = bare
        if not any(bare in (case, *at_micro) for case, at_micro in labels.items()):
            case, at, micro = bare.partition("@")
            listed = f"{BASELINE}{at}{micro}"
            if not _is_arm(case) or not any(listed in (one, *at_micro) for one, at_micro in labels.items()):
                known = ", ".join(f"{case} ({', '.join(at_micro)})" for case, at_micro in labels.items())
                raise UserError(
                    f"unknown case {name!r}; cases: {known}, or an arm at a micro-batch of {BASELINE}"
                )
        case = bare.partition("@")[0]
        if case != PLAIN:
            parse_arm(arm_of(case + plus + options))  # raises for a faulty modifier
        wanted.append((case, listed, plus + options))
    selected = []
    for shape in shapes:
        pairs = [(case + options, micro) for listed_case, micro in shape.cases for case, listed, options in wanted
                 if listed in (listed_case, f"{listed_case}@{micro}")]  # fmt: skip
        selected += [replace(shape, cases=tuple(dict.fromkeys(pairs)))] if pairs else []
    return selected


def arm_of(case: str) -> str:
    """Return the arm of a case: without the mix of RALEARN and without the options of the step."""
    attention, *suffixes = case.split("+")
    attention = attention if attention.startswith("RA:") else attention.partition(":")[0]
    return "+".join([attention, *(suffix for suffix in suffixes if "=" in suffix)])


def _is_arm(name: str) -> bool:
    with contextlib.suppress(VariantError):
        return bool(parse_arm(name))
    return False
