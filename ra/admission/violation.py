"""A violation of an attention's contract, and the line of the source that it concerns."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ra import names
from runtime.source_lines import short_path, source_line
from runtime.typed_json import JsonObject, Missing

OURS = ("ra.attention", "ra.published.", "ra.admission.")


@dataclass(frozen=True)
class Violation(JsonObject):
    """One fault of a variant. layer, position: None where the fault has none.

    size: of the effect, relative to the largest output. message: the fact. fix: one action.
    """

    variant: str
    check: str
    message: str
    fix: str
    layer: Missing[int] = None
    position: Missing[int] = None
    size: Missing[float] = None
    file: Missing[str] = None
    line: Missing[int] = None

    @property
    def where(self) -> str:
        """The source as file:line; "" where it is unknown."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        """The whole violation in one line."""
        layer = "" if self.layer is None else f"layer {self.layer}: "
        where = f" ({self.where})" if self.where else ""
        return f"{self.variant} fails the check {self.check}: {layer}{self.message}{where}; fix: {self.fix}"


def error_line(error: BaseException) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame in ra/custom, else in ra/ outside of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    for folder in (names.CUSTOM_FOLDER, Path(__file__).parents[1]):
        found = [f for f in frames if f.filename.startswith(f"{folder}/") and not f.filename.startswith(ours)]
        if found:
            return short_path(found[-1].filename), found[-1].lineno or 0, found[-1].name
    return None


def describe(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def violation(
    message: str, fix: str, module: Any = None, error: BaseException | None = None, **details: Any
) -> Violation:
    """A violation with its source: the line of an error, else the method of `module` that the variant defines.

    ra.admission.examine adds the variant and the check.
    """
    raised = error_line(error) if error else None
    file, line = raised[:2] if raised else source_line(module) or _only_line(module) or (None, None)
    return Violation("", "", message, fix, file=file, line=line, **details)


def _only_line(module: Any) -> tuple[str, int] | None:
    """The line of the one part of a block that the user wrote; None where there are none or several."""
    parts = module.modules() if hasattr(module, "modules") else ()
    lines = {source_line(part) for part in parts if not type(part).__module__.startswith(OURS)} - {None}
    return lines.pop() if len(lines) == 1 else None
