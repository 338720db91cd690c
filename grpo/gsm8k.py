"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): problems, prompt, reward. Needs neither torch nor TRL.

The published answer is the number behind "####". A response is right if its answer (grpo.gsm8k) equals it, as a
number: 1,200.00 equals 1200.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from referee.numerics.text_files import json_lines
from runtime.errors import UserError, one_line
from runtime.settings import GrpoConfig

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


def written_answer(response: str) -> Fraction | None:
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


HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANSWER = re.compile(r"####\s*([-+]?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


@dataclass(frozen=True)
class Problem:
    """answer: the published number, without separators."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return f"{self.question} {INSTRUCTION}"


def reward(response: str, answer: str) -> float:
    """Return 1 if the number that the response gives equals the answer, else 0."""
    return float(written_answer(response) == Fraction(Decimal(answer)))


def standard_error(accuracy: float, problems: int) -> float:
    """Return the standard error of an accuracy over independent problems."""
    return math.sqrt(accuracy * (1 - accuracy) / problems)


def read_problems(file: str, split: str) -> list[Problem]:
    """Read a .jsonl file; "" reads the split (train, test) of GSM8K from the hub. UserError: the first fault."""
    if not file:
        return _from_hub(split)
    lines = json_lines(Path(file).expanduser(), fix=f"CONFIG_GRPO_{split.upper()}_FILE= a .jsonl file")
    found = [_problem(content, where) for where, content in lines]
    if not found:
        raise UserError(f"{file} has no problems; fix: one JSON object with question and answer a line")
    return found


def _from_hub(split: str) -> list[Problem]:
    from datasets import load_dataset

    try:
        rows = load_dataset(HUB_NAME, "main", split=split)
    except Exception as error:  # whatever a network and a cache raise
        raise UserError(
            f"{HUB_NAME} cannot be loaded ({type(error).__name__}: {one_line(error)[:120]}); fix: connect to the hub, "
            f"or CONFIG_GRPO_{split.upper()}_FILE= a .jsonl file"
        ) from None
    return [_problem(row, f"{HUB_NAME} {split} {number}") for number, row in enumerate(rows)]


def _problem(content: object, where: str) -> Problem:
    values = [content.get(name) for name in ("question", "answer")] if isinstance(content, dict) else [None]
    if not all(isinstance(value, str) and value for value in values):
        raise UserError(f"{where} has no question and answer; fix: give both as text")
    question, solution = map(str, values)
    match = ANSWER.search(solution)
    if not match:
        raise UserError(f'{where}: the answer does not end with "#### number"; fix: correct it')
    return Problem(question, match[1].replace(",", ""))


def digest(problems: Sequence[Problem]) -> str:
    """Return the SHA-256 over the problems."""
    text = json.dumps([(one.question, one.answer) for one in problems])
    return hashlib.sha256(text.encode()).hexdigest()


PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets")


def require_inputs(settings: GrpoConfig, responses: int) -> None:
    """Raise UserError where a run would fail: packages, problems, model. responses: of a step."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"this Python lacks {', '.join(missing)}; fix: make (without PYTHON= it installs them)"
        )
    train, _ = (read_problems(file, split) for file, split in settings.files)
    needed = responses // settings.group
    if len(train) < needed:
        raise UserError(
            f"{len(train)} training problems are fewer than the {needed} of a step; fix: a lower CONFIG_EFFECTIVE_BATCH"
        )
    folder = Path(settings.model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json; fix: CONFIG_GRPO_MODEL= a folder with a model")
        return
    if settings.model.startswith(("/", ".", "~")) or settings.model.count("/") > 1:
        raise UserError(
            f"CONFIG_GRPO_MODEL={settings.model} does not exist; fix: a folder with a model, or a name on the hub"
        )
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(settings.model, "config.json")
    except Exception as error:  # whatever a network and a cache raise
        raise UserError(
            f"{settings.model} is not a folder and cannot be loaded from the hub ({type(error).__name__}: "
            f"{one_line(error)[:120]}); fix: connect to the hub, or CONFIG_GRPO_MODEL= a folder with the model"
        ) from None
