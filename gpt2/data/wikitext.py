"""WikiText's articles, and their text without the marks of its tokenization.

Articles and text are those of the task `wikitext` of lm-evaluation-harness 0.4.13, so that numbers compare with
published ones. The rules of the text come from Megatron-LM's zero-shot evaluation. One of them, for a digit between
slashes, is left out: nothing in WikiText matches it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# In this order. First spaces around signs:
SIGNS = (
    ("s '", "s'"),
    *((f" @{sign}@ ", sign) for sign in "-,."),
    *((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
)
# then the spaces inside a pair of brackets or quotes:
PAIRS = tuple(
    (
        re.compile(rf"{re.escape(first)}\s*([^{re.escape(last)}]*?)\s*{re.escape(last)}"),
        rf"{first}\g<1>{last}",
    )
    for first, last in ("()", "[]", "{}", '""', "''")
)
# then headings, degrees, lines, numbers that WikiText replaced by N, and the genitive.
REST = (
    *((" ".join("=" * level), "=" * level) for level in (4, 3, 2)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def articles(raw: str) -> Iterator[str]:
    """Yield the articles of WikiText's raw form. A first-level heading, ` = Title = `, begins one."""
    article: list[str] = []
    for line in raw.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "\n".join(article).strip():
                yield "\n".join(article)
            article = []
        article.append(line)
    yield "\n".join(article)


def plain_text(article: str) -> str:
    """Return the text as people write it: without spaces before commas and without marks such as `@-@`."""
    for mark, sign in SIGNS:
        article = article.replace(mark, sign)
    for pattern, pair in PAIRS:
        article = pattern.sub(pair, article)
    for mark, sign in REST:
        article = article.replace(mark, sign)
    return article
