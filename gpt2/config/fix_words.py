"""Read CONFIG_NUMERICS_FIX: the computations of a run that are replaced (gpt2.numerics.fixes). Needs no torch."""

from __future__ import annotations

import re

from gpt2.config.dotconfig import Symbols

WORD = re.compile(r"(cpu|upcast|small):.+")


def numerics_fix(symbols: Symbols) -> str:
    """Return the words, separated by blanks.

    ConfigError for a word of another form.
    """
    words = symbols.text("NUMERICS_FIX").split()
    for word in words:
        if not WORD.fullmatch(word):
            raise symbols.error(
                "NUMERICS_FIX",
                f"has {word!r}, which is not a fix; fix: use KIND:PATTERN with KIND cpu, upcast or small",
            )
    return " ".join(words)
