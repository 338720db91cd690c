"""Mark variants that train although they fail a check: their name says so in every result. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from gpt2.artifacts.run_record import RunRecord

T = TypeVar("T")


def marked_names(records: Iterable[RunRecord]) -> dict[str, str]:
    """Variant -> its name with the failed checks that CONFIG_ADMISSION_IGNORE let it train with."""
    failed: dict[str, set[str]] = {}
    for record in records:
        if record.admission and record.admission.ignored:
            failed.setdefault(record.variant, set()).update(record.admission.ignored)
    return {name: f"{name} (fails {', '.join(sorted(checks))})" for name, checks in failed.items()}


def with_marks(value: T, names: Mapping[str, str]) -> T:
    """Replace each text that is a variant's name by its marked one, in dataclasses, lists and mappings.

    Records of runs are not changed.
    """
    return _replaced(value, names) if names else value  # type: ignore[no-any-return]


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case str():
            return names.get(value, value)
        case list() | tuple() if not hasattr(value, "_fields"):
            return type(value)(_replaced(one, names) for one in value)
        case dict():
            return {_replaced(key, names): _replaced(one, names) for key, one in value.items()}
        case RunRecord():
            return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: _replaced(getattr(value, field.name), names)
            for field in dataclasses.fields(value)
            if field.init and field.name != "study"
        }
        return dataclasses.replace(value, **changed)
    return value


def warnings(names: Mapping[str, str]) -> list[str]:
    """One sentence for each marked variant."""
    return [
        f"Warning: {marked}: CONFIG_ADMISSION_IGNORE lets {name} train although it fails this examination. Its better "
        "or worse loss can be the effect of this fault."
        for name, marked in names.items()
    ]
