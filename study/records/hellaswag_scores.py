"""HellaSwag accuracies of a variant's runs, from their records. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from gpt2.artifacts.run_record import RunRecord
from gpt2.artifacts.typed_json import JsonObject, Missing, Range, Text

CHANCE = 0.25  # four endings
Choice = Annotated[int, Range(0, 3)]
OTHER_ITEMS = "its runs were scored on other items than most"


class Items(NamedTuple):
    """Which items were scored: how many, and their digest."""

    number: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.number:,} items (SHA-256 {self.sha256[:12]})"


@dataclass(frozen=True)
class ItemsFile(JsonObject):
    """hellaswag.json of a study: the file of the items, or the reason why there is none."""

    path: Missing[Text] = None
    items_sha256: Missing[Text] = None
    absent: Missing[Text] = None


@dataclass(frozen=True)
class ItemScores(JsonObject):
    """hellaswag.json of a run: for each item the chosen ending, and whether it is the right one."""

    choices: tuple[Choice, ...] = ()
    choices_norm: tuple[Choice, ...] = ()
    correct: tuple[bool, ...] = ()
    correct_norm: tuple[bool, ...] = ()


@dataclass
class HellaSwagScore:
    """Mean accuracy over the runs that have one; the standard error is that of the items."""

    acc: float | None
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    items: int
    runs: int
    near_chance: bool
    absent: str


def near_chance(rate: float, error: float) -> bool:
    """Whether a HellaSwag accuracy is within two standard errors of guessing."""
    return abs(rate - CHANCE) <= 2 * error


def scored_items(record: RunRecord) -> Items | None:
    """The items of a record's score; None where it has none."""
    score = record.hellaswag
    if not score or score.acc is None or score.acc_norm is None or not score.items or not score.items_sha256:
        return None
    return Items(score.items, score.items_sha256)


def common_items(records: Sequence[RunRecord]) -> Items | None:
    """The items of the most records, or the first of equals: the scores of the study are those on these items."""
    counted = Counter(items for record in records if (items := scored_items(record)))
    return counted.most_common(1)[0][0] if counted else None


def left_out(records: Sequence[RunRecord]) -> list[str]:
    """A note for each set of items that is not the common one: which runs were scored on it and do not count."""
    common = common_items(records)
    others: dict[Items, list[str]] = {}
    for record in records:
        items = scored_items(record)
        if items and items != common:
            others.setdefault(items, []).append(record.run)
    return [
        f"HellaSwag leaves out {', '.join(names)}: scored on {items}, the others on {common}"
        for items, names in others.items()
    ]


def hellaswag(records: Sequence[RunRecord], common: Items | None) -> HellaSwagScore:
    """Pooled over the records that have a score on the common items; the reason where there is none."""
    scores = [record for record in records if scored_items(record)]
    same = [record.hellaswag for record in scores if record.hellaswag and scored_items(record) == common]
    if common is None or not same:
        reasons = [
            record.hellaswag.absent for record in records if record.hellaswag and record.hellaswag.absent
        ]
        reason = OTHER_ITEMS if scores else (reasons or ["not asked for (CONFIG_HELLASWAG)"])[0]
        return HellaSwagScore(None, None, None, None, 0, 0, False, reason)
    from study.stats.statistics import pooled_proportion  # loads scipy, which a run does not need

    acc, acc_error = pooled_proportion([score.acc or 0.0 for score in same], common.number)
    norm, norm_error = pooled_proportion([score.acc_norm or 0.0 for score in same], common.number)
    near = near_chance(acc, acc_error) or near_chance(norm, norm_error)
    return HellaSwagScore(acc, acc_error, norm, norm_error, common.number, len(same), near, "")
