"""HellaSwag accuracies of a variant's runs, from their records. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from study.statistics import pooled_proportion

CHANCE = 0.25  # four endings


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


def hellaswag(records: list[dict[str, Any]]) -> HellaSwagScore:
    """Pooled over the records that have a score on the same items; the reason where there is none."""
    scores = [
        r["hellaswag"] for r in records if r["hellaswag"] and {"acc", "acc_norm"} <= set(r["hellaswag"])
    ]
    sizes = {score.get("items", 0) for score in scores}
    if len(sizes) != 1 or 0 in sizes:
        reasons = [r["hellaswag"]["absent"] for r in records if r["hellaswag"] and "absent" in r["hellaswag"]]
        reason = "its runs were scored on different items" if scores else (reasons or ["not asked for"])[0]
        return HellaSwagScore(None, None, None, None, 0, 0, False, reason)
    items = sizes.pop()
    acc, acc_error = pooled_proportion([score["acc"] for score in scores], items)
    norm, norm_error = pooled_proportion([score["acc_norm"] for score in scores], items)
    near = near_chance(acc, acc_error) or near_chance(norm, norm_error)
    return HellaSwagScore(acc, acc_error, norm, norm_error, items, len(scores), near, "")
