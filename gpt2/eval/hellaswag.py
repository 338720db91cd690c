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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.data.tokenizer import Tokenizer
from gpt2.eval.token_rows import row_losses
from gpt2.model.transformer import GPT2
from referee.numerics.text_files import json_lines
from runtime.errors import UserError

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
