"""Read the answer of a response: one number as people and models write it, in plain text, LaTeX and Unicode.

docs/grpo.md lists the forms. A fraction is its value; a number in a formula (2^10, 20 - 7, 5x, 18:30) is none.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

GLUE = "\x01"  # before a fraction: becomes a space after a digit (1½ is 1 1/2), else nothing
SIGNS = {
    "\u2212": "-", "\u2019": "'", "\u066b": ".", "\u066c": ",", "\u2044": "/", "\u2215": "/",
    **dict.fromkeys("≈≅≃∼≤≥→⇒", "="), **dict.fromkeys("×÷·⋅∙∗✕✖\u2061\u2062\u2063\u2064", "*"),
}  # fmt: skip
# In this order: escapes, breaks and spaces of LaTeX, its relations, degrees, braces around a sign, tags, currency.
PLAIN = tuple((re.compile(pattern), put) for pattern, put in (
    (r"\\\\|\\(?:begin|end)\s*\{[^{}]*\}|\\(?:newline|par|blacksquare|square)(?![a-zA-Z])", "\n"),
    (r"\\([$%#&_])", r"\1"),
    (r"\\!|\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|(?<=,)\\[,;: ]", ""),
    (r"\\[,;: ]|~|\\(?:thinspace|enspace|quad|qquad|nobreakspace)(?![a-zA-Z])|\\hspace\s*\{[^{}]*\}", " "),
    (r"\\[()\[\]]", " "),
    (r"\\(?:approx|sim|equiv|implies|iff|therefore|to|(?:Long)?[rR]ightarrow|[lg]eq?)(?![a-zA-Z])", "="),
    (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree", "°"),
    (r"(?<![a-zA-Z])\{([,.' ])\}", r"\1"),
    (r"</?[a-z]+>", ""),
    (r"([=(])\s*([-+])[ ]+(?=[\d$.])", r"\1 \2"),
    (r"\b(?:[A-Z]{1,2}(?=\$)|(?:USD|EUR|GBP|JPY|CNY|INR|CHF|CAD|AUD|Rs\.?)(?=\s?[-+$\d]))", ""),
    (r"(?<=[\d)])\s*[xX]\s*(?=[\d(.$])", "*"),
))  # fmt: skip
SHOWN = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf|tt)|mbox|[bf]box|boxed|operatorname|emph|underline)\s*\{([^{}]*)\}"
)
ORDINAL = re.compile(r"\^\s*\{?\s*(?:st|nd|rd|th)(?![a-zA-Z])\s*\}?")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
DEPTH = 8  # of commands inside each other

GROUPS = "|".join(rf"\d{{1,3}}(?:{sign}\d{{3}})+(?!\d)" for sign in (",", "'", " ", "_"))
WHOLE = rf"(?:{GROUPS}|\d{{1,2}}(?:,\d\d)+,\d{{3}}(?!\d)|\d+)"  # 1,234,567 and 12,34,567
DECIMAL = rf"(?:{WHOLE}(?:\.\d+)?(?:[eE][-+]?\d{{1,3}}(?!\w))?|\.\d+)"
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of ten
NUMBER = (
    rf"(?:(?:(?P<whole>\d+)[ ])?(?P<over>{DECIMAL})[ ]?/[ ]?(?P<under>{DECIMAL})"
    rf"|(?P<number>{DECIMAL})(?:[ ](?P<scale>{'|'.join(SCALES)})\b)?)"
)
LAST = re.compile(rf"(?<![a-zA-Z0-9_.])(?P<sign>[-+]?)(?:\$[ ]?)?(?P<inner>(?:(?<=\$)[-+])?){NUMBER}")
BEHIND = re.compile(rf"[\s*_`\"':=(\[{{$]*(?:(?P<sign>[-+])[\s(\[{{$]*)?(?P<inner>[-+]?)\$?{NUMBER}")
OPERAND = r"[ \t]*[-+$({\[]*[ \t]*(?:\.?\d|[b-zB-HJ-Z](?![a-zA-Z])|\\[a-zA-Z])"
GOES_ON = re.compile(
    rf"[.,:'_/&]*\d|[ \t]+\d|[xyzn](?![a-zA-Z])|[eE][-+]?\d|[(\[]\s*\d|_+\{{?[^\W_]"
    rf"|(?:[ \t$%°!\"'`)\]}}]|[*_]+(?=[\s.,;:)]|$))*"
    rf"(?:\^|\\[a-zA-Z]|[-+*/=<>±]+{OPERAND}|(?:plus|minus|times|divided by|mod)[ ]{OPERAND})"
)
BEFORE = re.compile(
    r"(?:\d[,.:'/_&]|[√∛∜]|[\^_]\s*\{?\s*|\\[a-zA-Z]+\s*[({\[]?\s*|[\]}]\s*\{\s*"
    r"|(?:\d|[)\]}!%°]|(?<![a-zA-Z])[b-zB-HJ-Z])(?:[ \t$%°)]*[-+*/^±]+[\s$({\[]*|(?P<next>[ \t]*)))$"
)


def answer(response: str) -> Fraction | None:
    """Return the number right behind the last "####", else the last number; None where there is none."""
    text = plain(response).rstrip().rstrip("#")
    _, mark, tail = text.rpartition("####")
    if mark:
        found = BEHIND.match(tail)
        return _value(found) if found and not GOES_ON.match(tail, found.end()) else None
    for found in reversed(list(LAST.finditer(text))):
        before = BEFORE.search(text[max(0, found.start() - 40) : found.start()])
        bound = before and (
            before["next"] is None or found["sign"] or (before["next"] and before[0][0].isdigit())
        )
        if not bound and not GOES_ON.match(text, found.end()):
            return _value(found)
    return None


def plain(text: str) -> str:
    """Return a text with its numbers in ASCII, and without the commands of LaTeX that only lay out or show text."""
    if not text.isascii():
        text = "".join(map(_ascii, text))
    for pattern, put in PLAIN:
        text = pattern.sub(put, text)
    for _ in range(DEPTH):
        before, text = text, FRACTION.sub(_over, SHOWN.sub(r"\1", text))
        if text == before:
            break
    text = ORDINAL.sub("th", text)
    return re.sub(rf"(?<=\d) ?{GLUE}", " ", text).replace(GLUE, "")


@functools.cache
def _ascii(sign: str) -> str:
    """Return a character as LaTeX and plain text write it: digits of any script, signs, spaces, fractions, powers."""
    if sign in SIGNS:
        return SIGNS[sign]
    if sign.isdecimal():
        return str(unicodedata.decimal(sign))
    category = unicodedata.category(sign)
    if category in ("Pd", "Sc", "Zs", "Cf"):  # dashes, currency, spaces, signs without a width
        return {"Pd": "-", "Sc": "$", "Zs": " ", "Cf": ""}[category]
    kind = unicodedata.decomposition(sign).partition(">")[0]
    shown = unicodedata.normalize("NFKC", sign).replace("\u2044", "/")
    return {"<fraction": GLUE, "<super": "^", "<sub": "_"}.get(kind, "") + shown


def _over(found: re.Match[str]) -> str:
    r"""Return a \frac of two numbers as a/b, and another one without its digits."""
    over, under = ((found[first] or found[first + 1] or "").strip() for first in (1, 3))
    numbers = re.fullmatch(rf"[-+]?{DECIMAL}", over) and re.fullmatch(DECIMAL, under)
    return f"{GLUE}{over}/{under}" if numbers else re.sub(r"\d", "x", found[0])


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the value of a match of NUMBER; None for a fraction over 0."""
    number, over, under = (re.sub("[,'_ ]", "", found[name] or "0") for name in ("number", "over", "under"))
    value: Fraction = Fraction(Decimal(number)) * 10 ** SCALES.get(found["scale"], 0)
    if found["over"]:
        if not Decimal(under):
            return None
        value = int(found["whole"] or 0) + Fraction(Decimal(over)) / Fraction(Decimal(under))
    return -value if (found["sign"] == "-") != (found["inner"] == "-") else value
