"""Read CONFIG_NUMERICS_FIX: the computations of a run that are replaced (gpt2.numerics.fixes). Needs no torch."""

from __future__ import annotations

import re

from gpt2.config.dotconfig import Symbols

WORD = re.compile(r"(cpu|upcast|small):.+")


def numerics_fix(symbols: Symbols) -> str:
    """Return the words, separated by blanks. Configurations of older versions have none.

    ConfigError for a word of another form, and for a sharded model, whose weights no fix can convert.
    """
    words = symbols.text("NUMERICS_FIX", absent="").split()
    for word in words:
        if not WORD.fullmatch(word):
            raise symbols.error(
                "NUMERICS_FIX",
                f"has {word!r}, which is not a fix; fix: use KIND:PATTERN with KIND cpu, upcast or small",
            )
    if words and symbols.flag("SHARDED", absent=False):
        raise symbols.error("NUMERICS_FIX", "and CONFIG_SHARDED=y exclude each other; fix: remove one")
    return " ".join(words)
