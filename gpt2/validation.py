"""Compute perplexity on fixed validation windows.

Shapes: n windows, T tokens scored in each, B windows a batch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from gpt2 import tokenizer
from gpt2.text_sources import DataError, HubSource, eval_files, open_hub, read_documents
from gpt2.transformer import GPT2
from referee.numerics.describe import to_float64
from referee.pages.markup import counted
from runtime import ranks
from runtime.errors import one_line
from runtime.files import write_bytes
from runtime.settings import WIKITEXT, Config, DataConfig, EvalSet

EVALUATION_TOKENS = {"cpu": 4096, "card": 65536}  # per evaluation batch


def evaluation_tokens(device: str) -> int:
    """Return the tokens of an evaluation batch on a device or a kind of device."""
    return EVALUATION_TOKENS["cpu" if device.startswith("cpu") else "card"]


@dataclass(frozen=True)
class Validation:
    """loss: mean nats per token. tokens: number scored. window_losses: mean nats per token of each window, in order."""

    loss: float
    tokens: int
    window_losses: list[float]

    @property
    def perplexity(self) -> float | None:
        """Return exp(loss), None if it is not finite."""
        return perplexity_of(self.loss)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout, gradients and cuDNN's attention in the block; restore them afterwards, on errors too.

    cuDNN makes a plan for every length, and the sequences of HellaSwag have many.
    """
    modes = [(module, module.training) for module in model.modules()]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for module, training in modes:
            module.training = training


def perplexity(
    model: GPT2,
    windows: np.ndarray,
    batch: int,
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    stop: Callable[[], None] | None = None,
) -> Validation:
    """Score windows (n, T+1) of token ids: T predictions each, `batch` windows at a time.

    Losses of single tokens are summed in float64, and the windows' sums exactly, so `batch` changes only the rounding
    inside the model. `stop` is called before each batch and raises to end the evaluation. Ranks share the batches.
    """
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(f"windows of shape {windows.shape}; fix: (n, T+1) with n and T at least 1")
    if batch < 1:
        raise ValueError(f"batch {batch}; fix: at least 1")

    def score(start: int) -> list[float]:
        ids = torch.from_numpy(windows[start : start + batch].astype(np.int64)).to(device)
        with autocast():
            losses_BT = model.token_losses(ids[:, :-1], ids[:, 1:])
        sums: list[float] = to_float64(losses_BT).sum(1).tolist()
        return sums

    with evaluating(model):
        scored = ranks.map_shared(score, range(0, len(windows), batch), stop)
    window_losses = [loss for losses in scored for loss in losses]
    tokens = windows.shape[0] * (windows.shape[1] - 1)
    loss = math.fsum(window_losses) / tokens
    means = [total / (windows.shape[1] - 1) for total in window_losses]
    return Validation(loss=loss, tokens=tokens, window_losses=means)


def perplexity_of(loss: float | None) -> float | None:
    """Return exp(loss); None without a loss, or if the result exceeds a float."""
    return math.exp(loss) if loss is not None and loss < 700 else None


Row = tuple[Sequence[int] | np.ndarray, int]  # tokens, and how many of them, at the end, are scored


def row_losses(
    model: GPT2,
    rows: Sequence[Row],
    *,
    batch_tokens: int,
    device: str,
    autocast: Callable[[], AbstractContextManager[Any]],
    stop: Callable[[], None] | None = None,
) -> list[float]:
    """Return for each row the nats of its scored tokens, summed in float64.

    Batches have at most batch_tokens padded tokens. `stop` is called before each batch and raises to end the scoring.
    Ranks share the batches.
    """

    def score_batch(indices: list[int]) -> list[float]:
        ids_BT, targets_BT = pad_rows([rows[index] for index in indices])
        with autocast():
            losses_BT = model.token_losses(ids_BT.to(device), targets_BT.to(device))
        losses: list[float] = to_float64(losses_BT).sum(1).tolist()
        return losses

    groups = list(batches([len(tokens) - 1 for tokens, _ in rows], batch_tokens))
    with evaluating(model):
        scored = ranks.map_shared(score_batch, groups, stop)
    found = [0.0] * len(rows)
    for indices, losses in zip(groups, scored, strict=True):
        for index, loss in zip(indices, losses, strict=True):
            found[index] = loss
    return found


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of row indices, longest rows first, with rows x longest <= batch_tokens.

    Longest first makes a batch that exceeds memory fail at the start. A row longer than batch_tokens forms one batch.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def pad_rows(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids_BT, targets_BT), int64. Right padding: id 0, which no earlier position attends to, and target -1."""
    ids, targets = [], []
    for tokens, scored in rows:
        row = torch.tensor(tokens)
        ids.append(row[:-1])
        targets.append(row[1:].clone())
        targets[-1][: max(0, len(tokens) - 1 - scored)] = -1
    return pad_sequence(ids, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=-1)


# Read the held-out texts of CONFIG_EVAL_SETS as tokens, with the words and bytes that their perplexities count.
#
# A document is a file, or a row of .jsonl and .parquet. Words are counted as in lm-evaluation-harness: the parts of a
# document between white space, with empty ones at its ends. The set `wikitext-2` has WikiText's articles as documents;
# its tokens are those of the text without marks, its words and bytes those of the articles.


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


SYMBOL = "CONFIG_EVAL_SETS"
HUB = HubSource("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "page")
HUB_FILE = "eval-wikitext-2.jsonl"
OFFLINE = f'fix without a network: {SYMBOL}="{WIKITEXT}=wiki.test.raw" with a copy'


@dataclass(frozen=True)
class EvalText:
    """A text as tokens, one int64 array for each document.

    text_sha256: of the documents before they are encoded. marks: as in a corpus's manifest.
    """

    name: str
    documents: list[np.ndarray]
    words: int
    bytes: int
    text_sha256: str
    marks: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of tokens; all are scored."""
        return sum(map(len, self.documents))


def check_texts(config: Config, report: Callable[[str], None]) -> None:
    """Read every set and report its size. DataError for one that cannot be used."""
    for one in config.evaluation.sets:
        text = read_text(one, config.data, config.model.block_size, report)
        report(
            f"eval set {one.name}: {counted(len(text.documents), 'document')}, {counted(text.words, 'word')}, "
            f"{text.bytes:,} bytes, {text.tokens:,} tokens"
        )
        if text.marks:
            report(
                f"eval set {one.name}: {tokenizer.describe_marks(tokenizer.load(config.data.tokenizer), text.marks)}"
            )


def read_text(one: EvalSet, data: DataConfig, block_size: int, report: Callable[[str], None]) -> EvalText:
    """Read a set. DataError names the set and what is wrong with it.

    block_size: of the model. A shorter text is refused. report: called before a download.
    """
    if one.name == WIKITEXT:
        originals = _wikitext(one, data.directory, report)
        texts = [plain_text(article) for article in originals]
    else:
        originals = texts = [text for path in eval_files(one) for text in read_documents(path) if text]
    encoding = tokenizer.load(data.tokenizer)
    documents = [np.array(encoding.encode(text), dtype=np.int64) for text in texts]
    tokens = sum(map(len, documents))
    if tokens < block_size:
        raise DataError(
            f"{SYMBOL}: the text of {one.name} has {tokens:,} tokens, less than one sequence of "
            f"CONFIG_GPT2_BLOCK_SIZE={block_size}; fix: more text, or leave the set out"
        )
    return EvalText(
        one.name,
        documents,
        words=sum(len(re.split(r"\s+", text)) for text in originals),
        bytes=sum(len(text.encode()) for text in originals),
        text_sha256=hashlib.sha256(json.dumps(originals).encode()).hexdigest(),
        marks=Counter(mark for text in texts for mark in tokenizer.MARK.findall(text)),
    )


def _wikitext(one: EvalSet, directory: Path, report: Callable[[str], None]) -> list[str]:
    """Return the articles: of files in WikiText's raw form, of rows of articles, or of the hub's copy."""
    files = eval_files(one) if one.pattern else [_downloaded(directory, report)]
    found: list[str] = []
    for path in files:
        rows = list(read_documents(path))
        found += rows if path.suffix in (".jsonl", ".parquet") else articles("".join(rows))
    return found


def _downloaded(directory: Path, report: Callable[[str], None]) -> Path:
    """Return the file of the hub's articles; load it if it is missing."""
    path = directory / HUB_FILE
    if not path.is_file():
        report(f"{WIKITEXT}: loading {HUB.path} from the hub")
        rows = open_hub(HUB, "test", OFFLINE)
        try:
            lines = [json.dumps({"text": row[HUB.column]}) + "\n" for row in rows]
        except Exception as error:  # the hub's client raises many kinds
            raise DataError(
                f"{HUB.path} cannot be read from the hub ({one_line(error)}); {OFFLINE}"
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        write_bytes(path, "".join(lines).encode())
    return path
