"""Results of a check. Reading and showing results needs no torch but for the numbers of `Measure`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numerics.oracle.rounding_model.measure import Measure

DEVICE, RECORDED_RUN = "device", "recorded"
EXACT, ROUNDING, WRONG, NOTE = "exact", "rounding", "wrong", "note"
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EPSILON |= {"complex64": EPSILON["float32"], "complex128": EPSILON["float64"]}
VERDICTS = (WRONG, ROUNDING, EXACT, NOTE)


@dataclass(frozen=True)
class Check:
    """A result, or a gradient, of one operation against float64.

    part: "result 0", "gradient 1" of the floating inputs in order, or "arguments". how: "device", "device, float32",
    "recorded" for a recorded result, or the kind of extreme input. values: where the inputs come from. derivation: the
    rows of the table. digest: of the inputs. remark: a fact about extreme inputs that is not an error.
    """

    name: str
    label: str
    direction: str
    part: str
    dtype: str
    how: str
    values: str
    measured: Measure
    derivation: str = ""
    digest: str = ""
    remark: str = ""

    @property
    def wrong(self) -> bool:
        """Return whether the error is beyond what rounding allows."""
        return self.measured.wrong

    @property
    def verdict(self) -> str:
        """Return exact (the nearest number of the dtype), rounding, note (a fact about extreme inputs) or wrong."""
        if self.wrong:
            return WRONG
        if self.remark:
            return NOTE
        return EXACT if self.measured.max_ulps <= 0.5 * (1 + 2.0**-20) else ROUNDING

    @property
    def units(self) -> float:
        """Return the Euclidean distance to float64, relative, in units of rounding: machine epsilons of the dtype."""
        return self.measured.distance / EPSILON.get(self.dtype, 1.0)

    @property
    def call(self) -> str:
        """Return the call as in "Functional.gelu.0 backward"."""
        return f"{self.name.removesuffix('.forward').replace('.forward.', '.')} {self.direction}"

    @property
    def key(self) -> tuple[str, ...]:
        """Return what the same check of another machine shares."""
        return self.name, self.direction, self.part, self.dtype, self.how

    @property
    def text(self) -> str:
        """Return the check in one line."""
        measured = self.measured
        numbers = f"{self.units:.3g} units of rounding, {measured.ratio:.3g} of what rounding allows"
        return f"{self.call}, {self.part}, {self.how}: {measured.why or numbers}"


@dataclass(frozen=True)
class Skipped:
    """An operation that was not checked, or one of its runs."""

    name: str
    label: str
    reason: str


def worst_first(checks: Sequence[Check]) -> list[Check]:
    """Order checks by the ratio of the error to what rounding allows."""
    return sorted(checks, key=lambda check: (VERDICTS.index(check.verdict), -check.measured.ratio))


def as_json(check: Check) -> dict[str, Any]:
    """Return a row of oracle.json. Numbers that are not finite are null."""
    measured = check.measured
    row: dict[str, Any] = {
        name: getattr(check, name)
        for name in (
            "name", "label", "direction", "part", "dtype", "how", "values", "verdict", "derivation", "digest", "remark",
        )
    }  # fmt: skip
    for name in ("max_ulps", "rms_ulps", "distance", "ratio"):
        value = getattr(measured, name)
        row[name] = value if math.isfinite(value) else None
    return row | {
        "elements": measured.elements,
        "flushed": measured.flushed,
        "histogram": list(measured.histogram),
        "why": measured.why,
    }


def from_json(row: Mapping[str, Any]) -> Check:
    """Read a row of oracle.json. KeyError, TypeError and ValueError where it is none."""
    numbers = {
        name: math.inf if row[name] is None else float(row[name])
        for name in ("max_ulps", "rms_ulps", "distance", "ratio")
    }
    measured = Measure(
        int(row["elements"]),
        histogram=tuple(int(count) for count in row["histogram"]),
        flushed=int(row["flushed"]),
        why=str(row["why"]),
        **numbers,
    )
    names = ("name", "label", "direction", "part", "dtype", "how", "values", "derivation", "digest", "remark")
    return Check(measured=measured, **{name: str(row[name]) for name in names})
