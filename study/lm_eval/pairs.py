"""Compare arms on tasks of lm-evaluation-harness: the same items and the same seed on both sides. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from referee.verdict.statistics import mean, standard_deviation
from study.lm_eval.records import PERPLEXITY, Metric, TaskResult
from study.records.runs import BASELINE

Items = NDArray[np.float64]


@dataclass(frozen=True)
class TaskResults:
    """The results of a run. arm: the name under which its seeds are averaged."""

    run: str
    arm: str
    seed: int
    tasks: Sequence[TaskResult]


@dataclass(frozen=True)
class ArmValue:
    """A metric of an arm, averaged over its seeds: perplexities geometrically.

    stderr: over the items, of this average. None where the values of the items were not kept. chance: of guessing.
    """

    arm: str
    task: str
    metric: str
    kind: str
    share: bool  # each item is right or wrong
    value: float
    stderr: float | None
    seeds: list[int]
    items: int
    chance: float | None


@dataclass(frozen=True)
class ArmDifference:
    """Arm minus baseline, paired by seed and by item. Of a perplexity: of its logarithm, in nats per item.

    stderr_items: over the items, for these trained models. stderr_seeds: over the seeds; None for one seed. The two
    answer different questions: other items, or another training.
    """

    arm: str
    baseline: str
    task: str
    metric: str
    kind: str
    share: bool
    difference: float
    stderr_items: float | None
    stderr_seeds: float | None
    seeds: list[int]
    items: int


@dataclass(frozen=True)
class TaskComparison:
    """notes: results that were left out, and rows that were truncated."""

    values: list[ArmValue]
    differences: list[ArmDifference]
    notes: list[str]


def compare_arms(results: Sequence[TaskResults], baseline: str = "") -> TaskComparison:
    """Average each arm and compare it with the baseline: by default B, or without it the first arm."""
    arms = list(dict.fromkeys(result.arm for result in results))
    baseline = baseline or (BASELINE if BASELINE in arms else next(iter(arms), ""))
    notes = _truncated(results)
    values: list[ArmValue] = []
    differences: list[ArmDifference] = []
    for task in dict.fromkeys(one.task for result in results for one in result.tasks):
        found = {(r.arm, r.seed): (r, one) for r in results for one in r.tasks if one.task == task}
        questions = Counter(one.questions for _, one in found.values()).most_common(1)[0][0]
        others = [r.run for r, one in found.values() if one.questions != questions]
        if others:
            notes.append(
                f"{task} leaves out {', '.join(others)}: evaluated on other items, or by another version, than most"
            )
        same = {key: one for key, (_, one) in found.items() if one.questions == questions}
        for name, chosen in dict.fromkeys((m.name, m.filter) for one in same.values() for m in one.metrics):
            metrics = {
                key: (metric, one)
                for key, one in same.items()
                for metric in one.metrics
                if (metric.name, metric.filter) == (name, chosen)
            }
            label = name if chosen == "none" else f"{name}, {chosen}"
            for arm in arms:
                values += _value(arm, task, label, {s: both for (a, s), both in metrics.items() if a == arm})
                differences += _difference(
                    arm, baseline, task, label, {k: m for k, (m, _) in metrics.items()}
                )
    return TaskComparison(values, differences, notes)


def _truncated(results: Sequence[TaskResults]) -> list[str]:
    found: dict[str, list[str]] = {}
    for result in results:
        for one in result.tasks:
            if one.truncated:
                found.setdefault(one.task, []).append(
                    f"{result.run} {one.truncated / max(1, one.requests):.0%}"
                )
    return [
        f"{task}: rows longer than the block size lost their beginning: {', '.join(shares)}"
        for task, shares in found.items()
    ]


def _value(arm: str, task: str, label: str, by_seed: dict[int, tuple[Metric, TaskResult]]) -> list[ArmValue]:
    if not by_seed:
        return []
    metrics = [metric for metric, _ in by_seed.values()]
    first, result = next(iter(by_seed.values()))
    items = _mean_items(metrics)
    if first.kind == PERPLEXITY:
        value = math.exp(mean([math.log(metric.value) for metric in metrics]))
        stderr = None if items is None else _item_error(items)
        stderr = stderr if stderr is None else value * stderr
    else:
        value = mean([metric.value for metric in metrics])
        stderr = None if items is None else _item_error(items)
    if len(metrics) == 1:
        stderr = first.stderr  # the harness's
    seeds = sorted(by_seed)
    share = all(metric.right for metric in metrics)
    chance = result.chance if share else None
    return [ArmValue(arm, task, label, first.kind, share, value, stderr, seeds, result.items, chance)]


def _difference(
    arm: str, baseline: str, task: str, label: str, metrics: dict[tuple[str, int], Metric]
) -> list[ArmDifference]:
    seeds = sorted(seed for name, seed in metrics if name == arm and (baseline, seed) in metrics)
    pairs = [(metrics[arm, seed], metrics[baseline, seed]) for seed in seeds]
    kinds = {metric.kind for pair in pairs for metric in pair}
    if arm == baseline or not pairs or len(kinds) != 1 or "" in kinds:
        return []
    (kind,) = kinds
    sign = -1.0 if kind == PERPLEXITY else 1.0  # items of a perplexity are log-likelihoods
    rows = np.array([sign * (np.array(one.values) - np.array(other.values)) for one, other in pairs])
    by_seed = rows.mean(axis=1).tolist()
    return [
        ArmDifference(
            arm=arm,
            baseline=baseline,
            task=task,
            metric=label,
            kind=kind,
            share=all(metric.right for pair in pairs for metric in pair),
            difference=mean(by_seed),
            stderr_items=_item_error(rows.mean(axis=0)),
            stderr_seeds=standard_deviation(by_seed) / math.sqrt(len(seeds)) if len(seeds) > 1 else None,
            seeds=seeds,
            items=rows.shape[1],
        )
    ]


def _mean_items(metrics: Sequence[Metric]) -> Items | None:
    """Average each item over the seeds; None where one has no items or the value follows in another way."""
    rows = [metric.values for metric in metrics]
    kinds = {metric.kind for metric in metrics}
    if "" in kinds or len(kinds) > 1 or len({len(row) for row in rows}) > 1:
        return None
    average: Items = np.array(rows).mean(axis=0)
    return average


def _item_error(items: Items) -> float | None:
    """Standard error of the mean over the items; None for a single one."""
    return float(items.std(ddof=1) / math.sqrt(items.size)) if items.size > 1 else None
