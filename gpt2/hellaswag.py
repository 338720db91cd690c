"""Score HellaSwag: which of four endings does the model find most likely?

Zellers et al., "HellaSwag: Can a Machine Really Finish Your Sentence?" (2019). Items are prepared and scored as in
lm-evaluation-harness 0.4.13, task `hellaswag` (version 1, zero-shot), so that numbers compare with published ones:

    acc       the ending with the highest log-likelihood, summed over its tokens, is correct
    acc_norm  the same after dividing by the length of the prepared ending in characters (code points), without the
              space before it: `completion_len = len(choice)` in `ConfigurableTask.process_results` (api/task.py)

acc_norm is often described as normalised by byte length. The harness counts characters; its metric acc_bytes counts
bytes. The two can differ on the 181 of the 10,042 items with an ending beyond ASCII. Guessing gives 25 %.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.tokenizer import Tokenizer
from gpt2.transformer import GPT2
from gpt2.validation import row_losses
from referee.numerics.text_files import json_lines
from runtime.errors import UserError, one_line
from runtime.files import write_bytes
from runtime.settings import EvaluationConfig

ENDINGS = 4
LINE_LIMIT = 2**16  # bytes of an item


class HellaSwagError(UserError, RuntimeError):
    """The items or the model's scores cannot be used."""


@dataclass(frozen=True)
class Item:
    """A prepared item: texts for the model, label 0 .. 3. joint: the text between the query and an ending."""

    query: str
    endings: tuple[str, ...]
    label: int
    joint: str = " "


@dataclass(frozen=True)
class HellaSwag:
    """Accuracies in 0 .. 1 with standard errors (None for a single item), and the choices item by item.

    correct, correct_norm: whether the choice equals the item's label; runs can be compared item by item.
    log_likelihoods: nats, one list of four per item, in the order of the items. items_sha256: see `digest`.
    """

    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None
    items: int
    items_sha256: str
    choices: list[int]
    choices_norm: list[int]
    correct: list[bool]
    correct_norm: list[bool]
    log_likelihoods: list[list[float]]


# --- reading the items


def load_items(path: Path, limit: int) -> list[Item]:
    """Read the items of a .jsonl file in its order; with a limit, item floor(i * n / limit) for each i < limit.

    The subset is spread over the file because the order is not random: in the original, 3,243 items from video
    captions precede 6,799 from WikiHow. It depends on n and limit only. A limit of 0 or above n: all items.
    UserError names the file and the line that is not an item.
    """
    if limit < 0:
        raise ValueError(f"limit {limit}; fix: 0 for all items, or a positive number")
    items = [_item(value, where) for where, value in json_lines(path, LINE_LIMIT)]
    if not items:
        raise HellaSwagError(f"{path} has no items; fix: one JSON object per line")
    if limit == 0 or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def _item(raw: Any, where: str) -> Item:
    if not isinstance(raw, dict):
        raise HellaSwagError(
            f"{where}: {type(raw).__name__} instead of a JSON object; fix: correct or remove the line"
        )

    def value(key: str, wanted: str, valid: Callable[[Any], bool]) -> Any:
        if key not in raw:
            raise HellaSwagError(f'{where}: "{key}" is missing; fix: {wanted}')
        if not valid(raw[key]):
            raise HellaSwagError(f'{where}: "{key}" is {json.dumps(raw[key])[:60]}; fix: {wanted}')
        return raw[key]

    activity, ctx_a, ctx_b = (value(key, "a text", _is_text) for key in ("activity_label", "ctx_a", "ctx_b"))
    texts = value(
        "endings",
        f"a list of {ENDINGS} texts",
        lambda found: isinstance(found, list) and len(found) == ENDINGS and all(map(_is_text, found)),
    )
    endings = tuple(map(prepare, texts))
    if not all(endings):
        raise HellaSwagError(f'{where}: "endings"[{endings.index("")}] has no text outside square brackets')
    labels = [*range(ENDINGS), *map(str, range(ENDINGS))]  # copies on the Hub have digits
    label = value("label", f"0 .. {ENDINGS - 1}", lambda found: type(found) in (int, str) and found in labels)
    return Item(prepare(f"{activity}: {ctx_a} {ctx_b.capitalize()}"), endings, int(label))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def prepare(text: str) -> str:
    """Remove WikiHow's mark-up: [title] ends a sentence; other [brackets] go with their content."""
    # an open bracket without its end is matched as well, so that the time is linear
    ended = text.strip().replace(" [title]", ". ")
    without = re.sub(r"\[[^\]\n]*(\]?)", lambda found: "" if found[1] else found[0], ended)
    return without.replace("  ", " ")


def digest(items: Sequence[Item]) -> str:
    """Return the SHA-256 over the prepared texts and labels in order. The file's formatting does not matter."""
    asked = [[item.query, item.endings, item.label] for item in items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


# --- scoring


def encode_pair(tokenizer: Tokenizer, query: str, ending: str, joint: str = " ") -> tuple[list[int], int]:
    """Return (tokens of query and ending together, number of the ending's tokens).

    What joins the two belongs to the ending's first token; so do trailing spaces of the query. An empty query is an end
    of text. An ending that joins the query in one token is encoded alone: nothing to score would be certain.
    """
    context = query.rstrip()
    tokens = tokenizer.encode(query + joint + ending)
    if not context:
        return [tokenizer.eot, *tokens], len(tokens)
    before = tokenizer.encode(context)
    if len(tokens) <= len(before):
        tokens = before + tokenizer.encode(query[len(context) :] + joint + ending)
    return tokens, len(tokens) - len(before)


def score(
    model: GPT2,
    items: Sequence[Item],
    tokenizer: Tokenizer,
    *,
    batch_tokens: int,
    block_size: int,
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    stop: Callable[[], None] | None = None,
) -> HellaSwag:
    """Score every ending of every item, in batches of at most batch_tokens padded tokens sorted by length.

    Rows longer than block_size + 1 tokens are truncated from the left, the query first. `stop` is called before each
    batch and raises to end the scoring. Ranks share the batches. HellaSwagError if a log-likelihood is NaN or there is
    no item.
    """
    if not items:
        raise HellaSwagError("there are no items to score; fix: at least one item")
    pairs = [
        encode_pair(tokenizer, item.query, ending, item.joint) for item in items for ending in item.endings
    ]
    rows = [(tokens[-(block_size + 1) :], scored) for tokens, scored in pairs]

    losses = row_losses(model, rows, batch_tokens=batch_tokens, device=device, autocast=autocast, stop=stop)
    sums = [-loss for loss in losses]
    return _summary(items, [sums[start : start + ENDINGS] for start in range(0, len(sums), ENDINGS)])


def _summary(items: Sequence[Item], log_likelihoods: list[list[float]]) -> HellaSwag:
    for number, values in enumerate(log_likelihoods):
        if any(math.isnan(value) for value in values):
            raise HellaSwagError(f"item {number}: log-likelihoods {values} contain NaN")
    by_length = [
        [value / len(ending) for value, ending in zip(values, item.endings, strict=True)]
        for item, values in zip(items, log_likelihoods, strict=True)
    ]
    choices, choices_norm = (
        [max(range(ENDINGS), key=values.__getitem__) for values in scores]  # the first of equal ones
        for scores in (log_likelihoods, by_length)
    )
    correct, correct_norm = (
        [choice == item.label for choice, item in zip(chosen, items, strict=True)]
        for chosen in (choices, choices_norm)
    )
    acc, acc_stderr = _accuracy(correct)
    acc_norm, acc_norm_stderr = _accuracy(correct_norm)
    return HellaSwag(
        acc=acc,
        acc_stderr=acc_stderr,
        acc_norm=acc_norm,
        acc_norm_stderr=acc_norm_stderr,
        items=len(items),
        items_sha256=digest(items),
        choices=choices,
        choices_norm=choices_norm,
        correct=correct,
        correct_norm=correct_norm,
        log_likelihoods=log_likelihoods,
    )


def _accuracy(correct: Sequence[bool]) -> tuple[float, float | None]:
    """Return (p, sqrt(p (1 - p) / (n - 1))): the mean and its standard error."""
    n = len(correct)
    p = sum(correct) / n
    return p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None


ITEMS = 320  # at most; the standard error is below 3 points
CONTEXT, ENDING = 16, 8  # tokens, about


def choice_items(windows: np.ndarray, tokenizer: Tokenizer, seed: int = 0) -> list[Item] | str:
    """Return items spread over validation windows (n, T+1), or the reason why there are none.

    The true ending follows the context, also within a word. The others follow three other contexts and have as many
    characters. The result is a pure function of the arguments.
    """
    tokens = windows[:, :-1].ravel()
    width = min(CONTEXT + ENDING, windows.shape[1] - 1)
    length = max(1, width * ENDING // (CONTEXT + ENDING)) * tokenizer.bytes_per_token
    places = len(tokens) // width
    count = min(places, ITEMS)
    parts = []
    for place in (number * places // count for number in range(count)):
        piece = tokens[place * width : (place + 1) * width].tolist()
        text = tokenizer.decode_bytes(piece).decode(errors="ignore")
        if tokenizer.eot not in piece and len(text) >= 2 * length:  # an item is of one document
            parts.append((text[:-length], text[-length:]))
    if len({ending for _, ending in parts}) < ENDINGS:
        return f"the validation text of {len(tokens):,} tokens gives fewer than {ENDINGS} different endings"
    draw = np.random.default_rng(seed)
    items = []
    for context, true in parts:
        others: list[str] = []
        while len(others) < ENDINGS - 1:
            other = parts[int(draw.integers(len(parts)))][1]
            if other not in (true, *others):
                others.append(other)
        label = int(draw.integers(ENDINGS))
        items.append(Item(context, (*others[:label], true, *others[label:]), label, joint=""))
    return items


URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
FILE_NAME = "hellaswag_val.jsonl"
STALL_SECONDS = 10.0  # without a byte from the server
MAX_BYTES = 64 * 2**20  # the original is 12 MB
REMEDY = "fix: set CONFIG_HELLASWAG_FILE to a copy"


def obtain(
    evaluation: EvaluationConfig,
    data_dir: Path,
    report: Callable[[str], None],
    url: str = URL,
    timeout_seconds: float = 20.0,
    sha256: str = SHA256,
) -> Path | str:
    """Return the path of the items, or the reason why there are none. Downloads the original if necessary.

    A download ends after `timeout_seconds`, or after STALL_SECONDS without a byte. HellaSwagError: a configured file
    does not exist, or the download would replace another file.
    """
    configured = evaluation.hellaswag_file
    if configured is not None:
        if not configured.is_file():
            raise HellaSwagError(
                f"CONFIG_HELLASWAG_FILE={configured} is not a file; fix: name a .jsonl of items, or leave it empty to "
                "download"
            )
        return configured
    path = data_dir / FILE_NAME
    try:
        if path.exists():
            if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
                return path
            raise HellaSwagError(
                f"{path} is not the original HellaSwag file, which this project downloads there; fix: to score it, set "
                f"CONFIG_HELLASWAG_FILE={path}; else move it to another folder"
            )
        report(f"HellaSwag: downloading {url} (timeout {timeout_seconds:g} s)")
        content = _download(url, timeout_seconds)
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            return f"{url} has SHA-256 {found[:12]}..., not {sha256[:12]}...; {REMEDY}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    except (OSError, ValueError, HTTPException) as error:
        return f"HellaSwag cannot be downloaded from {url}: {one_line(error)}; {REMEDY}"
    return path


def _download(url: str, timeout_seconds: float) -> bytes:
    """Return the whole body. OSError if it is too large or not complete within `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    content = bytearray()
    with urllib.request.urlopen(url, timeout=min(STALL_SECONDS, timeout_seconds)) as response:
        while chunk := response.read1(1 << 16):
            content += chunk
            if len(content) > MAX_BYTES or time.monotonic() > deadline:
                raise OSError(f"{len(content)} bytes and no end within {timeout_seconds:g} s")
    return bytes(content)
