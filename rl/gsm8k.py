"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): problems, prompt, reward. Needs neither torch nor TRL.

The published answer is the number behind "####". A response is right if its answer (rl.written_numbers) equals it, as a
number: 1,200.00 equals 1200.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from referee.numerics.text_files import json_lines
from rl import written_numbers
from runtime.errors import UserError, one_line

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
    return float(written_numbers.answer(response) == Fraction(Decimal(answer)))


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


def digest(train: Sequence[Problem], test: Sequence[Problem]) -> str:
    """Return the SHA-256 over all problems."""
    text = json.dumps([[(one.question, one.answer) for one in part] for part in (train, test)])
    return hashlib.sha256(text.encode()).hexdigest()
