"""Generate items as long as HellaSwag's, and extrapolate the cost of an evaluation from a timed share of it.

Results: seconds of the whole HellaSwag, seconds of one validation, and the share of a run spent in validations.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tiktoken

from bench.tables import INTERVAL, ResultTable, format_spread, mebibytes, spread
from gpt2.eval.hellaswag import ENDINGS, Item, encode_pair

HELLASWAG_GOAL_SECONDS, VALIDATION_GOAL = 60.0, 0.03
GOAL_CARD = "h200"

# Percentiles (LEVELS) of the GPT-2 tokens of HellaSwag's validation set (sha256 0aa3b888...), after its preparation.
LEVELS = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)


@dataclass(frozen=True)
class Kind:
    """One source of HellaSwag's items: their number, and quantiles of the tokens of a query and of an ending."""

    items: int
    query: tuple[int, ...]
    ending: tuple[int, ...]


KINDS = (
    Kind(  # captions of videos
        3243,
        (12, 13, 15, 17, 21, 24, 26, 29, 31, 33, 37, 41, 45, 53, 81),
        (2, 5, 6, 7, 8, 10, 11, 12, 14, 16, 18, 22, 26, 37, 76),
    ),
    Kind(  # WikiHow
        6799,
        (15, 36, 42, 45, 50, 53, 56, 59, 62, 65, 69, 75, 79, 86, 105),
        (15, 19, 23, 25, 29, 31, 34, 36, 39, 42, 45, 50, 54, 62, 87),
    ),
)
FULL_ITEMS = sum(kind.items for kind in KINDS)


def synthetic_items(encoding: tiktoken.Encoding, seed: int = 0) -> list[Item]:
    """Generate FULL_ITEMS items of random words with the token lengths of KINDS, reproducible by seed.

    Each word is one token. The lengths of a query and of its endings are drawn independently: a batch holds endings of
    similar length from any item.
    """
    draw = random.Random(seed)
    words = one_token_words(encoding)
    items = []
    for kind in KINDS:
        for _ in range(kind.items):
            query = " ".join(["the", *draw.choices(words, k=length(kind.query, draw) - 1)])
            endings = tuple(
                " ".join(draw.choices(words, k=length(kind.ending, draw))) for _ in range(ENDINGS)
            )
            items.append(Item(query, endings, draw.randrange(ENDINGS)))
    return items


def one_token_words(encoding: tiktoken.Encoding) -> list[str]:
    """Return the words that are one token after a space."""
    found = (re.fullmatch(rb" ([a-z]{2,})", token) for token in encoding.token_byte_values())
    return [match[1].decode() for match in found if match]


def length(quantiles: Sequence[int], draw: random.Random) -> int:
    """Draw one length from the distribution with these quantiles at LEVELS, linear between them."""
    level = 100 * draw.random()
    place = next(place for place, upper in enumerate(LEVELS[1:]) if level < upper)
    share = (level - LEVELS[place]) / (LEVELS[place + 1] - LEVELS[place])
    return round(quantiles[place] + share * (quantiles[place + 1] - quantiles[place]))


def scored_tokens(items: Sequence[Item], encoding: tiktoken.Encoding, block_size: int) -> int:
    """Count the positions that the model computes, without padding, to score all endings of the items."""
    return sum(
        min(len(encode_pair(encoding, item.query, ending)[0]) - 1, block_size)
        for item in items
        for ending in item.endings
    )


@dataclass(frozen=True)
class Whole:
    """The full evaluation of a run. interval_tokens: training tokens from one validation to the next.

    run_seconds: of training. items, item_tokens: of the whole HellaSwag.
    """

    validation_tokens: int
    interval_tokens: int
    run_seconds: float
    items: int
    item_tokens: int


@dataclass(frozen=True)
class Sample:
    """One variant in one round: the scored share, its time, and the peak bytes with the weights."""

    case: str
    validation_tokens: int
    validation_seconds: float
    items: int
    item_tokens: int
    hellaswag_seconds: float
    peak_bytes: int


def validations(whole: Whole, training_rate: float) -> int:
    """Count the validations of a run at this rate in tokens/s: one at each grid point inside it and one at its end."""
    tokens = int(whole.run_seconds * training_rate)
    return max(1, -(-tokens // whole.interval_tokens)) if whole.interval_tokens else 1


def rows_of(
    samples: Sequence[Sample], training_rates: Mapping[str, float], whole: Whole
) -> list[dict[str, Any]]:
    """Return one row a variant: measured values and extrapolations as `spread` over the rounds.

    A timed share is scaled to the whole by its tokens. timed_items, timed_validation_tokens: size of the share.
    """
    rows = []
    for case in dict.fromkeys(sample.case for sample in samples):
        own = [sample for sample in samples if sample.case == case]
        hellaswag = [sample.hellaswag_seconds * whole.item_tokens / sample.item_tokens for sample in own]
        rates = [sample.validation_tokens / sample.validation_seconds for sample in own]
        count = validations(whole, training_rates[case])
        seconds = [whole.validation_tokens / rate for rate in rates]
        rows.append(
            {
                "case": case,
                "rounds": len(own),
                "timed_items": own[0].items,
                "timed_validation_tokens": own[0].validation_tokens,
                "items_per_second": spread([whole.items / value for value in hellaswag]),
                "hellaswag_seconds": spread(hellaswag),
                "validation_tokens_per_second": spread(rates),
                "validation_seconds": spread(seconds),
                "training_tokens_per_second": training_rates[case],
                "validations": count,
                "validation_share": spread([count * value / whole.run_seconds for value in seconds]),
                "peak_bytes": max(sample.peak_bytes for sample in own),
            }
        )
    return rows


COLUMNS = {
    "variant": lambda row: row["case"],
    "items/s": lambda row: format_spread(row["items_per_second"], ".1f"),
    "HellaSwag s": lambda row: format_spread(row["hellaswag_seconds"], ".1f"),
    "validation tokens/s": lambda row: format_spread(row["validation_tokens_per_second"], ",.0f"),
    "one validation s": lambda row: format_spread(row["validation_seconds"], ".2f"),
    "% of a run": lambda row: format_spread(row["validation_share"], ".2f", 100),
    "peak MiB": lambda row: mebibytes(row["peak_bytes"]),
}


def table(rows: list[dict[str, Any]], whole: Whole) -> ResultTable:
    """List the rows. Notes state the extrapolations and the source of the number of validations."""
    first = rows[0]
    notes = [f"{first['rounds']} rounds, median [{INTERVAL}]"]
    if first["timed_items"] < whole.items:
        notes.append(
            f"HellaSwag s is EXTRAPOLATED by tokens from {first['timed_items']} items to all {whole.items:,}"
        )
    if first["timed_validation_tokens"] < whole.validation_tokens:
        notes.append(
            f"one validation s is EXTRAPOLATED from {first['timed_validation_tokens']:,} tokens to all "
            f"{whole.validation_tokens:,}"
        )
    counts = ", ".join(
        f"{row['case']} {row['validations']} ({row['training_tokens_per_second']:,.0f} tokens/s)"
        for row in rows
    )
    notes.append(
        f"validations of a run: {counts}: every {whole.interval_tokens:,} training tokens and at the end, in "
        f"{whole.run_seconds:g} s at the training speed measured here"
    )
    return ResultTable.of("cost of evaluation", COLUMNS, rows, notes)


def goals(rows: list[dict[str, Any]], peak_flops: float, goal_card_flops: float) -> str:
    """Compare the results with the goals. The time limit of a card grows as its peak FLOP/s fall below the goal's."""
    limit = HELLASWAG_GOAL_SECONDS * max(1.0, goal_card_flops / peak_flops)
    lines = []
    for row in rows:
        seconds, share = row["hellaswag_seconds"]["median"], row["validation_share"]["median"]
        lines.append(
            f"{row['case']}: HellaSwag {'within' if seconds <= limit else 'NOT within'} {limit:.0f} s, "
            f"validation {'within' if share <= VALIDATION_GOAL else 'NOT within'} {VALIDATION_GOAL:.0%} of a run"
        )
    if limit > HELLASWAG_GOAL_SECONDS:
        lines.append(
            f"goal: {HELLASWAG_GOAL_SECONDS:g} s on an {GOAL_CARD.upper()}-class card; here in proportion to peak FLOPs"
        )
    return "\n".join(lines)
