"""Read the held-out texts of CONFIG_EVAL_SETS as tokens, with the words and bytes that their perplexities count.

A document is a file, or a row of .jsonl and .parquet. Words are counted as in lm-evaluation-harness: the parts of a
document between white space, with empty ones at its ends. The set `wikitext-2` has WikiText's articles as documents;
its tokens are those of the text without marks, its words and bytes those of the articles.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gpt2 import tokenizer
from gpt2.text_sources import DataError, HubSource, eval_files, open_hub, read_documents
from referee.pages.markup import counted
from runtime.errors import one_line
from runtime.files import write_bytes
from runtime.settings import WIKITEXT, Config, DataConfig, EvalSet

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

    text_sha256: of the documents. tokens_sha256: of the arrays. marks: as in a corpus's manifest.
    """

    name: str
    documents: list[np.ndarray]
    words: int
    bytes: int
    text_sha256: str
    tokens_sha256: str
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
    digest = hashlib.sha256()
    for ids in documents:
        digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
    return EvalText(
        one.name,
        documents,
        words=sum(len(re.split(r"\s+", text)) for text in originals),
        bytes=sum(len(text.encode()) for text in originals),
        text_sha256=hashlib.sha256(json.dumps(originals).encode()).hexdigest(),
        tokens_sha256=digest.hexdigest(),
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
