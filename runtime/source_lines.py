"""Find the source line of a module's method."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

LIBRARY = ("torch.", "gpt2.")  # modules whose lines are never the user's
ROOT = Path(__file__).parents[1]


def short_path(path: str) -> str:
    """A source path relative to the repository, where it lies there."""
    return str(Path(path).relative_to(ROOT)) if Path(path).is_relative_to(ROOT) else path


def source_line(
    module: Any, methods: tuple[str, ...] = ("attend", "forward", "__init__")
) -> tuple[str, int] | None:
    """File and line of the first of `methods` that a class outside torch and gpt2 defines for this module."""
    for kind in type(module).__mro__:
        if f"{kind.__module__}.".startswith(LIBRARY) or kind is object:
            continue
        for name in methods:
            if name in vars(kind):
                try:
                    _, line = inspect.getsourcelines(vars(kind)[name])
                    return short_path(inspect.getsourcefile(kind) or "?"), line
                except (OSError, TypeError):
                    return None
    return None
