"""The row that every page and command of this package prints, and its table in plain text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from referee.numerics.text_files import finite

HEADINGS = ("Call", "Side", "Place", "Target", "Golden", "Units", "Bound", "Evidence")
EVIDENCE = ("data", "parameter", "setting", "computed", "changed", "one side", "update")
WIDEST = 48  # characters of a cell in a terminal


@dataclass(frozen=True)
class TableRow:
    """One difference, finding or check. A field that a command has no use for is empty."""

    call: str  # of the call, tensor or setting, as in "Module.blocks.0.Block.forward.0"
    side: str = ""  # which of its values: input, parameter, output, gradient, setting
    place: str = ""  # of the value among these, as in "0.hidden", or the step
    target: str = ""  # the value
    golden: str = ""  # the value that it is compared with, or what is expected
    units: float = 0.0  # the error, in units of rounding
    bound: float = math.nan  # the largest error that rounding explains, in the same units
    evidence: str = ""  # one of EVIDENCE, or a word of the command
    stack: tuple[str, ...] = ()  # callers, innermost first

    @property
    def text(self) -> str:
        """Return the difference in one line, without its call."""
        return f"{self.side} {self.place}: {self.target} against {self.golden}"

    @property
    def as_json(self) -> dict[str, Any]:
        """Return the fields. Numbers that are not finite are None."""
        return {name: finite(value) for name, value in vars(self).items()}

    @property
    def cells(self) -> list[str]:
        """Return the texts of the row, in the order of HEADINGS."""
        texts = [self.call, self.side, self.place, self.target, self.golden]
        return [*texts, format_number(self.units), format_number(self.bound), self.evidence]


def format_number(number: float) -> str:
    """Return three digits; nothing for NaN, which is no number."""
    return "" if math.isnan(number) else f"{number:.3g}"


def text_table(rows: Iterable[TableRow]) -> list[str]:
    """Return lines with HEADINGS above and without columns that are empty. A long cell keeps its end."""
    lines = [list(HEADINGS), *(row.cells for row in rows)]
    used = [place for place in range(len(HEADINGS)) if any(line[place] for line in lines[1:])]
    cells = [
        [
            text if len(text) <= WIDEST else f"..{text[2 - WIDEST :]}"
            for text in (line[place] for place in used)
        ]
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells] if len(lines) > 1 else []
