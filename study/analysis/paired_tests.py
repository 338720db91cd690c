"""Paired tests by item of four endings, from the files beside the records.

They compare trained models on the same questions and say nothing about another seed. Files that are missing, torn or
of another evaluation are left out. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from referee.verdict.statistics import holm, sign_test
from runtime import records, run_record
from runtime.files import DamagedFileError
from study.hellaswag_scores import EndingsTask, ItemScores, common_items, entry, scored_items
from study.runs import BASELINE, Run

MOST_SEEDS = 20  # whose files are read: more seeds answer the same items
ANSWERS = {"acc": "correct", "acc_norm": "correct_norm"}  # measure -> its key in the file
Answers = NDArray[np.int_]


@dataclass(frozen=True)
class ItemTest:
    """Items on which the variant was right more often than the baseline, and less often; McNemar's exact test.

    With several seeds the test is of the sign of each item's net score. Adjusted by Holm over the variants.
    """

    task: str  # key of the task
    variant: str
    measure: str
    seeds: list[int]
    items: int
    wins: int
    losses: int
    p_value: float
    adjusted_p: float


def item_tests(study_dir: Path, used: Sequence[Run], task: EndingsTask) -> list[ItemTest]:
    """Test each variant against the baseline at the same seeds, for each measure, on the items of most runs."""
    common = common_items([run.record for run in used], task)
    used = [run for run in used if common and scored_items(run.record, task) == common]
    seeds = [run.seed for run in used if run.variant == BASELINE][:MOST_SEEDS]
    answers = {(run.variant, run.seed): _answers(study_dir, run, task) for run in used if run.seed in seeds}
    tests = []
    for measure in task.measures:
        net: dict[str, dict[int, Answers]] = {}  # variant -> seed -> variant minus baseline, item by item
        for (variant, seed), right in answers.items():
            base = answers[BASELINE, seed].get(measure)
            if variant != BASELINE and seed is not None and base is not None and measure in right:
                net.setdefault(variant, {})[seed] = right[measure] - base
        found = [(name, list(by_seed), sum(by_seed.values())) for name, by_seed in net.items()]
        results = [sign_test(np.asarray(score).tolist()) for _, _, score in found]
        adjusted = holm([result.p_value for result in results])
        for (variant, tested, score), result, p in zip(found, results, adjusted, strict=True):
            counts = (np.size(score), result.wins, result.losses)
            tests.append(ItemTest(task.key, variant, measure, tested, *counts, result.p_value, p))
    return tests


def _answers(study_dir: Path, run: Run, task: EndingsTask) -> dict[str, Answers]:
    """Measure -> 1 for each right item and 0 for each wrong one, if the file agrees with the run's score."""
    try:
        path = run.file(study_dir, f"{task.key}.json")
        content = records.read(ItemScores, path, run_record.owner(run.record))
    except (FileNotFoundError, DamagedFileError):
        return {}
    score, found = entry(run.record, task), {}
    for measure in task.measures:
        right = getattr(content, ANSWERS[measure])
        if score is not None and right and len(right) == score.items:
            rate = getattr(score, measure)
            if rate is not None and abs(sum(right) / len(right) - rate) < 1e-6:
                found[measure] = np.array(right, dtype=int)
    return found
