"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): problems, prompt, reward. Needs neither torch nor TRL.

The published answer is the number behind "####". A response is right if its answer equals it, as a number: 1,200.00
equals 1200.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from referee.numerics.text_files import json_lines
from runtime.errors import UserError, one_line
from runtime.settings import GrpoConfig

SEPARATOR = re.compile(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))")  # of thousands
NUMBER = r"(?P<sign>[-+]?)(?:\\?\$)?(?P<inner>-?)(?P<digits>\d+(?:\.\d+)?|\.\d+)"
LAST = re.compile(rf"(?<![\w.]){NUMBER}")
BEHIND = re.compile(rf"(?:[^\w.+-]|_|\\[a-z]+)*{NUMBER}")  # signs and commands of LaTeX may come first


def written_answer(response: str) -> Decimal | None:
    """Return the number right behind the last "####", else the last number; None where there is none.

    lm-evaluation-harness has the first as its filter strict-match, the second as flexible-extract.
    """
    text = unicodedata.normalize("NFKC", response).replace("\u2212", "-").rstrip().rstrip("#")
    text = SEPARATOR.sub("", text)
    _, mark, tail = text.rpartition("####")
    *_, found = [BEHIND.match(tail)] if mark else [None, *LAST.finditer(text)]
    if not found:
        return None
    value = Decimal(found["digits"])
    return -value if "-" in (found["sign"], found["inner"]) else value


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
    return float(written_answer(response) == Decimal(answer))


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


def require_inputs(settings: GrpoConfig, responses: int) -> int:
    """Raise UserError where a run would fail: packages, problems, model. Return the parameters of the model.

    responses: of a step. A model of the hub is downloaded once for all runs.
    """
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
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder, parameters = Path(settings.model).expanduser(), 0
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(settings.model, ignore_patterns=["*.bin", "*.pth", "*.gguf"]))
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "np") as weights:
                parameters += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except Exception as error:  # whatever files, a network and a cache raise
        raise UserError(
            f"CONFIG_GRPO_MODEL={settings.model} is no folder with a model and no model of the hub that can be loaded "
            f"({type(error).__name__}: {one_line(error)[:120]}); fix: a folder with a model, or connect to the hub"
        ) from None
    if not parameters:
        raise UserError(
            f"{folder} has no weights in *.safetensors; fix: CONFIG_GRPO_MODEL= a folder with them"
        )
    return parameters
