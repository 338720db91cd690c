"""Accuracies of a variant's runs on items of four endings, from their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from runtime.records import Record, Text
from runtime.run_record import HellaSwagEntry, RunRecord

CHANCE = 0.25  # four endings
Choice = Annotated[int, Meta(ge=0, le=3)]
OTHER_ITEMS = "its runs were scored on other items than most"


@dataclass(frozen=True)
class EndingsTask:
    """A task of four endings."""

    key: str  # of run.json and report.json; KEY.json of a run has the choice for each item
    name: str  # on pages
    heading: str  # of its column in a table of results, which has the last measure
    measures: tuple[str, ...] = ("acc",)  # and "acc_norm" where the endings of an item have different lengths
    about: str = ""


ABOUT_CHOICE = (
    "A context from the validation text, the text after it, and the text after three other contexts: in how many items "
    "is the true ending the most likely one? Scored like HellaSwag; higher is better. No verdict uses it."
)
HELLASWAG = EndingsTask("hellaswag", "HellaSwag", "HellaSwag (norm)", ("acc", "acc_norm"))
CHOICE = EndingsTask("choice", "continuation choice", "continuation choice", about=ABOUT_CHOICE)
TASKS = (HELLASWAG, CHOICE)


class Items(NamedTuple):
    """Which items were scored: how many, and their digest."""

    number: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.number:,} items (SHA-256 {self.sha256[:12]})"


class ItemsFile(Record, frozen=True):
    """hellaswag.json of a study: the file of the items, or the reason why there is none."""

    path: Text | None = None
    items_sha256: Text | None = None
    absent: Text | None = None


class ItemScores(Record, frozen=True):
    """hellaswag.json or choice.json of a run: for each item the chosen ending, and whether it is the right one."""

    choices: tuple[Choice, ...] = ()
    choices_norm: tuple[Choice, ...] = ()
    correct: tuple[bool, ...] = ()
    correct_norm: tuple[bool, ...] = ()


@dataclass
class EndingsScore:
    """Mean accuracy on a task over the runs that have one; the standard error is that of the items."""

    acc: float | None
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    items: int
    runs: int
    near_chance: bool
    absent: str


def near_chance(rate: float, error: float) -> bool:
    """Whether an accuracy is within two standard errors of guessing."""
    return abs(rate - CHANCE) <= 2 * error


def entry(record: RunRecord, task: EndingsTask) -> HellaSwagEntry | None:
    """The entry of a task in a record."""
    found: HellaSwagEntry | None = getattr(record, task.key)
    return found


def scored_items(record: RunRecord, task: EndingsTask = HELLASWAG) -> Items | None:
    """The items of a record's score; None where it has none."""
    score = entry(record, task)
    if not score or score.acc is None or score.acc_norm is None or not score.items or not score.items_sha256:
        return None
    return Items(score.items, score.items_sha256)


def common_items(records: Sequence[RunRecord], task: EndingsTask = HELLASWAG) -> Items | None:
    """The items of the most records, or the first of equals: the scores of the study are those on these items."""
    counted = Counter(items for record in records if (items := scored_items(record, task)))
    return counted.most_common(1)[0][0] if counted else None


def left_out(records: Sequence[RunRecord], task: EndingsTask) -> list[str]:
    """A note for each set of items that is not the common one: which runs were scored on it and do not count."""
    common = common_items(records, task)
    others: dict[Items, list[str]] = {}
    for record in records:
        items = scored_items(record, task)
        if items and items != common:
            others.setdefault(items, []).append(record.run)
    return [
        f"{task.name} leaves out {', '.join(names)}: scored on {items}, the others on {common}"
        for items, names in others.items()
    ]


def endings_score(records: Sequence[RunRecord], task: EndingsTask, common: Items | None) -> EndingsScore:
    """Pooled over the records that have a score on the common items; the reason where there is none."""
    scores = [record for record in records if scored_items(record, task)]
    same = [
        score for record in scores if scored_items(record, task) == common and (score := entry(record, task))
    ]
    if common is None or not same:
        reasons = [one.absent for record in records if (one := entry(record, task)) and one.absent]
        reason = OTHER_ITEMS if scores else (reasons or [""])[0]
        return EndingsScore(None, None, None, None, 0, 0, False, reason)
    from referee.verdict.statistics import pooled_proportion  # loads scipy, which a run does not need

    acc, acc_error = pooled_proportion([score.acc or 0.0 for score in same], common.number)
    norm, norm_error = pooled_proportion([score.acc_norm or 0.0 for score in same], common.number)
    near = near_chance(acc, acc_error) or near_chance(norm, norm_error)
    return EndingsScore(acc, acc_error, norm, norm_error, common.number, len(same), near, "")
