"""Read CONFIG_EVAL_SETS: held-out texts by name. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpt2.config.dotconfig import Symbols, split_words

WIKITEXT = "wikitext-2"  # the set whose text and treatment are known by its name
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")


@dataclass(frozen=True)
class EvalSet:
    """A held-out text. pattern: a file or a glob; "": the text that the name means, from the hub."""

    name: str
    pattern: str = ""


def eval_sets(symbols: Symbols) -> tuple[EvalSet, ...]:
    """Return the sets in their order.

    ConfigError for a name of another form, a name twice, and an unknown name without a file.
    """
    found: dict[str, EvalSet] = {}
    for word in split_words(symbols.text("EVAL_SETS")):
        name, equals, pattern = word.partition("=")
        if not NAME.fullmatch(name):
            raise symbols.error(
                "EVAL_SETS",
                f"has the name {name!r}; fix: NAME=FILE with at most 40 letters, digits, . _ and - in NAME",
            )
        if name in found:
            raise symbols.error(
                "EVAL_SETS",
                f"has the name {name!r} twice; fix: one name for each text; a glob takes several files",
            )
        if not pattern and (equals or name != WIKITEXT):
            raise symbols.error(
                "EVAL_SETS",
                f"has {word!r} without a file; fix: {name}=FILE (only {WIKITEXT} is known without one)",
            )
        found[name] = EvalSet(name, pattern)
    return tuple(found.values())
