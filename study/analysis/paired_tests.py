"""Paired tests by HellaSwag item, from the files beside the records.

They compare trained models on the same questions and say nothing about another seed. Files that are missing, torn or
of another evaluation are left out. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.records.hellaswag_scores import common_items, scored_items
from study.records.runs import BASELINE, Run
from study.stats.statistics import holm, sign_test

MOST_SEEDS = 20  # whose files are read: more seeds answer the same items
MEASURES = {"correct": "acc", "correct_norm": "acc_norm"}


@dataclass(frozen=True)
class ItemTest:
    """Items on which the variant was right more often than the baseline, and less often; McNemar's exact test.

    With several seeds the test is of the sign of each item's net score. Adjusted by Holm over the variants.
    """

    variant: str
    measure: str
    seeds: list[int]
    items: int
    wins: int
    losses: int
    p_value: float
    adjusted_p: float


def item_tests(study_dir: Path, used: Sequence[Run]) -> list[ItemTest]:
    """Test each variant against the baseline at the same seeds, for each measure, on the items of most runs."""
    common = common_items([run.record for run in used])
    used = [run for run in used if common and scored_items(run.record) == common]
    files: dict[str, dict[str, Any]] = {}

    def right(run: Run, key: str) -> list[float]:
        if run.name not in files:
            files[run.name] = _read(run.file(study_dir, "hellaswag.json"))
        values, scored = files[run.name].get(key), run.record.hellaswag
        if not isinstance(values, list) or set(map(type, values)) != {bool}:
            return []
        same = (
            scored is not None
            and len(values) == scored.items
            and abs(sum(values) / len(values) - getattr(scored, MEASURES[key])) < 1e-6
        )
        return values if same else []

    tests = []
    for key, measure in MEASURES.items():
        results = {
            variant: (by_seed, sign_test(_sum_over_seeds(by_seed)))
            for variant, by_seed in _pairs(used, lambda run, key=key: right(run, key)).items()  # type: ignore[misc]
        }
        adjusted = holm([result.p_value for _, result in results.values()])
        for (variant, (by_seed, result)), p in zip(results.items(), adjusted, strict=True):
            items = len(next(iter(by_seed.values())))
            tests.append(
                ItemTest(
                    variant, measure, list(by_seed), items, result.wins, result.losses, result.p_value, p
                )
            )
    return tests


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _pairs(used: Sequence[Run], read: Callable[[Run], list[float]]) -> dict[str, dict[int, list[float]]]:
    """variant -> seed -> variant minus baseline, item by item, at the baseline's first MOST_SEEDS seeds."""
    base: dict[int, list[float]] = {}
    for run in (run for run in used if run.variant == BASELINE):
        values = read(run) if len(base) < MOST_SEEDS else []
        if values and run.seed is not None and len(values) == len(next(iter(base.values()), values)):
            base[run.seed] = values
    found: dict[str, dict[int, list[float]]] = {}
    for run in used:
        if run.variant != BASELINE and run.seed in base:
            values, other = read(run), base[run.seed]
            if len(values) == len(other):
                found.setdefault(run.variant, {})[run.seed] = [
                    a - b for a, b in zip(values, other, strict=True)
                ]
    return found


def _sum_over_seeds(by_seed: dict[int, list[float]]) -> list[float]:
    """The sum over seeds for each item."""
    return [math.fsum(column) for column in zip(*by_seed.values(), strict=True)]
