"""The palette color of each arm, the same on every page."""

from __future__ import annotations

from collections.abc import Sequence

from ra.arms import PATTERNS
from referee.pages.document import Legend
from referee.pages.html_page import COLORS
from referee.pages.markup import ColorLabel

FIXED_COLORS = tuple(PATTERNS)


def palette_index(name: str, names: Sequence[str]) -> int:
    """Return the palette color of a name: fixed for a pattern, the next ones in turn for the others of `names`."""
    if name in FIXED_COLORS:
        return FIXED_COLORS.index(name) % COLORS
    others = [other for other in names if other not in FIXED_COLORS]
    return (len(FIXED_COLORS) + (others.index(name) if name in others else 0)) % COLORS


def color(name: str, names: Sequence[str]) -> str:
    """Return the color of a name as page.js reads it, the same on every page."""
    return f"var(--v{palette_index(name, names)})"


def color_label(name: str, names: Sequence[str]) -> ColorLabel:
    """Return the name with the dot of its color."""
    return ColorLabel(name, palette_index(name, names))


def legend(names: Sequence[str]) -> Legend:
    """Return buttons for the names in their colors."""
    return Legend([color_label(name, names) for name in names])
