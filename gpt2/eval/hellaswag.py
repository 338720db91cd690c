"""HellaSwag: which of four endings does the model find most likely?

Zellers et al., "HellaSwag: Can a Machine Really Finish Your Sentence?" (2019). Items are prepared and scored as
lm-evaluation-harness 0.4.13 does for its task `hellaswag` (version 1, no examples in the prompt), so that numbers
compare with published ones:

    acc       the ending with the highest log-likelihood, summed over its tokens, is the right one
    acc_norm  the same after dividing by the length of the prepared ending in characters (code points), without the
              space before it: `completion_len = len(choice)` in `ConfigurableTask.process_results` (api/task.py)

acc_norm is often described as normalised by byte length, but the harness's code counts characters and has bytes only
in its separate metric acc_bytes; the two can differ on the 181 of the 10,042 items with an ending beyond ASCII.

Guessing gives 25 %. Where the items cannot be had there is no score, and `Absent` says why.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
import torch

from gpt2.config.config import EvaluationConfig
from gpt2.eval.validation import evaluating
from gpt2.model.transformer import GPT2
from gpt2.system.errors import UserError

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
FILE_NAME = "hellaswag_val.jsonl"
ENDINGS = 4
STALL_SECONDS = 10.0  # without a byte from the server
MAX_BYTES = 64 * 2**20  # the original is 12 MB
REMEDY = "right: CONFIG_HELLASWAG_FILE names a copy"


class HellaSwagError(UserError, RuntimeError):
    """The items that were named cannot be used, or the model's scores cannot."""


@dataclass(frozen=True)
class Absent:
    """There are no items, and why."""

    reason: str


@dataclass(frozen=True)
class Item:
    """A prepared item: texts as the model gets them (an ending without the space before it), label 0 .. 3."""

    query: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class HellaSwag:
    """Fractions in 0 .. 1 with their standard errors (None for a single item), and what was chosen, item by item.

    correct, correct_norm: whether the choice was the item's label, so that runs can be compared item by item.
    log_likelihoods: nats, one list of four an item, in the order of the items. items_sha256: see `digest`.
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


# --- getting the file


def obtain(
    evaluation: EvaluationConfig,
    data_dir: Path,
    report: Callable[[str], None],
    url: str = URL,
    timeout_seconds: float = 20.0,
    sha256: str = SHA256,
) -> Path | Absent:
    """The file of items: the one that is configured, the one downloaded before, or the original, downloaded now.

    A download ends after `timeout_seconds` in all, or STALL_SECONDS without a byte. Whatever goes wrong with it is
    Absent; only a configured file that is not there is an error (HellaSwagError).
    """
    named = evaluation.hellaswag_file
    if named is not None:
        if not named.is_file():
            raise HellaSwagError(
                f"CONFIG_HELLASWAG_FILE={named} is not a file; right: a .jsonl of items, or empty to download"
            )
        return named
    path = data_dir / FILE_NAME
    try:
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            return path
        report(f"HellaSwag: downloading {url} (at most {timeout_seconds:g} s)")
        content = _download(url, timeout_seconds)
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            return Absent(f"{url} has SHA-256 {found[:12]}..., not {sha256[:12]}...; {REMEDY}")
        _write_whole(path, content)
    except (DownloadError, OSError) as error:
        return Absent(f"HellaSwag could not be had from {url}: {_one_line(error)}; {REMEDY}")
    return path


class DownloadError(RuntimeError):
    """The server gave no complete file in time."""


def _download(url: str, timeout_seconds: float) -> bytes:
    """The whole body, or DownloadError after timeout_seconds at most.

    In a thread of its own, which is left behind when time is up: looking up a host's name and reading slow
    headers know no deadline.
    """
    outcome: list[bytes | Exception] = []
    deadline = time.monotonic() + timeout_seconds

    def work() -> None:
        try:
            outcome.append(_read_body(url, deadline, min(STALL_SECONDS, timeout_seconds)))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="hellaswag-download", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if not outcome:
        raise DownloadError(f"no complete answer within {timeout_seconds:g} s")
    if isinstance(outcome[0], Exception):
        raise DownloadError(_one_line(outcome[0])) from outcome[0]
    return outcome[0]


def _read_body(url: str, deadline: float, stall_seconds: float) -> bytes:
    content = bytearray()
    with urllib.request.urlopen(url, timeout=stall_seconds) as response:
        expected = response.headers.get("Content-Length")
        while chunk := response.read1(1 << 16):
            content += chunk
            if len(content) > MAX_BYTES:
                raise DownloadError(f"more than {MAX_BYTES} bytes")
            if time.monotonic() > deadline:
                raise DownloadError(f"only {len(content)} bytes when time was up")
    if expected is not None and len(content) != int(expected):
        raise DownloadError(f"the connection ended after {len(content)} of {expected} bytes")
    return bytes(content)


def _write_whole(path: Path, content: bytes) -> None:
    """Under a temporary name, then renamed: at `path` there is a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- reading the items


def load_items(path: Path, limit: int) -> list[Item]:
    """The items of a .jsonl file in its order; with a limit, item floor(i * n / limit) for each i below it.

    The subset is spread over the file because its order is not random: in the original, 3,243 items from video
    captions come before 6,799 from WikiHow. It depends on n and limit alone. limit 0, or one above n: all.
    HellaSwagError names the file and line that is not an item.
    """
    if limit < 0:
        raise ValueError(f"limit {limit}; right: 0 for all items, or how many")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise HellaSwagError(f"{path} cannot be read: {_one_line(error)}") from error
    items = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise HellaSwagError(f"{path} has no items; right: one JSON object a line")
    if limit == 0 or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def _parse(line: bytes, where: str) -> Item:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise HellaSwagError(f"{where}: not JSON in UTF-8 ({_one_line(error)})") from error
    if not isinstance(raw, dict):
        raise HellaSwagError(f"{where}: {type(raw).__name__} instead of a JSON object")
    for key in ("activity_label", "ctx_a", "ctx_b", "endings", "label"):
        if key not in raw:
            raise HellaSwagError(f'{where}: "{key}" is missing')
    for key in ("activity_label", "ctx_a", "ctx_b"):
        if not isinstance(raw[key], str):
            raise HellaSwagError(f'{where}: "{key}" is {json.dumps(raw[key])[:60]}; right: a text')
    context = raw["ctx_a"] + " " + raw["ctx_b"].capitalize()
    return Item(
        query=prepare(raw["activity_label"] + ": " + context),
        endings=_endings(raw["endings"], where),
        label=_label(raw["label"], where),
    )


def _endings(raw: object, where: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or len(raw) != ENDINGS or not all(isinstance(text, str) for text in raw):
        raise HellaSwagError(
            f'{where}: "endings" is {json.dumps(raw)[:60]}; right: a list of {ENDINGS} texts'
        )
    endings = tuple(prepare(text) for text in raw)
    if not all(endings):
        raise HellaSwagError(f'{where}: "endings"[{endings.index("")}] has no text outside square brackets')
    return endings


def _label(raw: object, where: str) -> int:
    """A number, or its digits: copies on the hub have those."""
    known = {str(label): label for label in range(ENDINGS)}
    if isinstance(raw, bool) or not isinstance(raw, int | str) or str(raw) not in known:
        raise HellaSwagError(f'{where}: "label" is {json.dumps(raw)[:60]}; right: 0 .. {ENDINGS - 1}')
    return known[str(raw)]


def prepare(text: str) -> str:
    """Take out WikiHow's mark-up: a [title] ends a sentence, other [brackets] go with what they hold."""
    without = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return without.replace("  ", " ")


def digest(items: Sequence[Item]) -> str:
    """SHA-256 of what is asked and in which order: the prepared texts and labels, however their file is written."""
    asked = [[item.query, item.endings, item.label] for item in items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


# --- scoring


def encode_pair(encoding: tiktoken.Encoding, query: str, ending: str) -> tuple[list[int], int]:
    """(tokens of query and ending together, how many of them are the ending's).

    The two are joined by a space, which belongs to the ending's first token; so do the spaces that end the query.
    """
    context = query.rstrip()
    tokens = encoding.encode_ordinary(query + " " + ending)
    return tokens, len(tokens) - len(encoding.encode_ordinary(context))


def score(
    model: GPT2,
    items: Sequence[Item],
    encoding: tiktoken.Encoding,
    *,
    batch_tokens: int,
    block_size: int,
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    stop: Callable[[], None] | None = None,
) -> HellaSwag:
    """Every ending of every item in batches of at most batch_tokens padded tokens, endings of a length together.

    What exceeds block_size + 1 tokens is cut from the left, the query first. `stop` is called before each batch
    and raises to end the scoring. HellaSwagError where a log-likelihood is not a number, and where there is no item.
    """
    if not items:
        raise HellaSwagError("no HellaSwag items to score; right: at least one")
    pairs = [encode_pair(encoding, item.query, ending) for item in items for ending in item.endings]
    rows = [(tokens[-(block_size + 1) :], scored) for tokens, scored in pairs]
    sums = [0.0] * len(rows)
    with evaluating(model):
        for indices in batches([len(tokens) - 1 for tokens, _ in rows], batch_tokens):
            if stop is not None:
                stop()
            ids_BT, targets_BT = _pad([rows[index] for index in indices])
            with autocast():
                losses_BT = model.token_losses(ids_BT.to(device), targets_BT.to(device))
            for index, loss in zip(indices, losses_BT.double().sum(1).tolist(), strict=True):
                sums[index] = -loss
    return _summary(items, [sums[start : start + ENDINGS] for start in range(0, len(sums), ENDINGS)])


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of rows, longest first (what does not fit in memory fails at once): rows x longest <= batch_tokens.

    A row that is longer than batch_tokens is a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _pad(rows: Sequence[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids_BT, targets_BT), int64: padded at the right with 0, which no earlier position sees, and target -1."""
    T = max(len(tokens) for tokens, _ in rows) - 1
    ids_BT = torch.zeros(len(rows), T, dtype=torch.int64)
    targets_BT = torch.full((len(rows), T), -1, dtype=torch.int64)
    for row, (tokens, scored) in enumerate(rows):
        last = len(tokens) - 1
        first = max(0, last - scored)
        ids_BT[row, :last] = torch.tensor(tokens[:-1])
        targets_BT[row, first:last] = torch.tensor(tokens[first + 1 :])
    return ids_BT, targets_BT


def _summary(items: Sequence[Item], log_likelihoods: list[list[float]]) -> HellaSwag:
    for number, values in enumerate(log_likelihoods):
        if any(math.isnan(value) for value in values):
            raise HellaSwagError(f"HellaSwag item {number}: the log-likelihoods {values} are not numbers")
    choices = [_largest(values) for values in log_likelihoods]
    choices_norm = [
        _largest([value / len(ending) for value, ending in zip(values, item.endings, strict=True)])
        for item, values in zip(items, log_likelihoods, strict=True)
    ]
    correct = [choice == item.label for choice, item in zip(choices, items, strict=True)]
    correct_norm = [choice == item.label for choice, item in zip(choices_norm, items, strict=True)]
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


def _largest(values: Sequence[float]) -> int:
    """The index of the largest value, the first of equals."""
    return max(range(len(values)), key=values.__getitem__)


def _accuracy(correct: Sequence[bool]) -> tuple[float, float | None]:
    """(p, sqrt(p (1 - p) / (n - 1))): the standard error of a mean from the sample's standard deviation."""
    n = len(correct)
    p = sum(correct) / n
    return p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
