"""Accuracies of a variant's runs on items of four endings, from their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from referee.verdict.rows import Row
from runtime.run_record import HellaSwagEntry, RunRecord
from study.runs import Run

CHANCE = 0.25  # four endings
OTHER_ITEMS = "its runs were scored on other items than most"


@dataclass(frozen=True)
class EndingsTask:
    """A task of four endings."""

    key: str  # of run.json, report.json and rows
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


def accuracy(run: Run, task: EndingsTask, measure: str = "acc") -> Row | None:
    """The row of an accuracy at the end of a run; None where it was not scored."""
    return next(reversed(run.series(task.key, measure).values()), None)


def items_text(row: Row) -> str:
    """The items of an accuracy: how many, and the first digits of their SHA-256."""
    return f"{row.items:,} items (SHA-256 {row.data.partition('@')[2]})"


def common_items(runs: Sequence[Run], task: EndingsTask) -> str | None:
    """The items of the most runs, or the first of equals: the scores of the study are those on these items."""
    counted = Counter(row.data for run in runs if (row := accuracy(run, task)))
    return counted.most_common(1)[0][0] if counted else None


def on_common_items(runs: Sequence[Run], task: EndingsTask, common: str | None) -> list[Run]:
    """The runs that were scored on the common items."""
    return [run for run in runs if (row := accuracy(run, task)) and row.data == common]


def left_out(runs: Sequence[Run], task: EndingsTask) -> list[str]:
    """A note for each set of items that is not the common one: which runs were scored on it and do not count."""
    rows = {run.name: row for run in runs if (row := accuracy(run, task))}
    common = common_items(runs, task)
    usual = next((items_text(row) for row in rows.values() if row.data == common), "")
    others: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row.data != common:
            others.setdefault(items_text(row), []).append(name)
    return [
        f"{task.name} leaves out {', '.join(names)}: scored on {items}, the others on {usual}"
        for items, names in others.items()
    ]


def endings_score(runs: Sequence[Run], task: EndingsTask, common: str | None) -> EndingsScore:
    """Pooled over the runs that have a score on the common items; the reason where there is none."""
    same = on_common_items(runs, task, common)
    if not same:
        reasons = [one.absent for run in runs if (one := entry(run.record, task)) and one.absent]
        reason = OTHER_ITEMS if any(accuracy(run, task) for run in runs) else (reasons or [""])[0]
        return EndingsScore(None, None, None, None, 0, 0, False, reason)
    from referee.verdict.statistics import pooled_proportion  # loads scipy, which a run does not need

    table = [[row for run in same if (row := accuracy(run, task, name))] for name in ("acc", "acc_norm")]
    number = table[0][0].items
    acc, norm = (pooled_proportion([row.value for row in rows], number) for rows in table)
    near = near_chance(*acc) or near_chance(*norm)
    return EndingsScore(*acc, *norm, number, len(same), near, "")
