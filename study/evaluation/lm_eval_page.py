"""Results of lm-evaluation-harness as blocks of a document: for the terminal, for reports. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from referee.pages.document import COPY, SORT, Block, BulletList, Document, Note, Paragraph, Section, Table
from referee.pages.markup import Text
from referee.verdict.statistics import mean, standard_deviation
from study.arm_colors import color_label
from study.evaluation.lm_eval_records import PERPLEXITY, LmEvalRecord, Metric, TaskResult, read_final
from study.runs import BASELINE, Run, variant_order

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
                values += _pair_value(
                    arm, task, label, {s: both for (a, s), both in metrics.items() if a == arm}
                )
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


def _pair_value(
    arm: str, task: str, label: str, by_seed: dict[int, tuple[Metric, TaskResult]]
) -> list[ArmValue]:
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


NO_VERDICT = (
    "No verdict follows from these numbers: the study declared the validation loss as its comparison before the first "
    "run, and among many tasks and metrics some differences exceed two standard errors by chance."
)
ABOUT_VALUES = "± one standard error over the items. † within two of them of guessing, so no sign of skill."
ABOUT_MEANS = "Arms with several seeds show their mean; more seeds do not shrink this error: same items."
ABOUT_DIFFERENCES = (
    "Arm minus {baseline} at the same seed and on the same items: accuracies in percentage points, perplexities as the "
    "difference of their logarithms. ± items: one standard error over the items, for these trained models. ± seeds: "
    "over the seeds, for another training."
)
ONE_SEED = "With one seed nothing is known about another training."
NO_PAIRS = "No two arms have a run of the same seed, so nothing is paired."


def run_results(records: Sequence[tuple[str, LmEvalRecord]]) -> list[TaskResults]:
    """Return the results of records with the name of their study. Two runs of one name get the study before the arm."""
    names = [(record.variant, record.seed) for _, record in records]
    several = len(set(names)) < len(names)
    return [
        TaskResults(
            f"{study}/{record.run}" if several else record.run,
            f"{study}/{record.variant}" if several else record.variant,
            record.seed,
            record.tasks,
        )
        for study, record in records
    ]


def results_document(records: Sequence[tuple[str, LmEvalRecord]], tasks: Sequence[str]) -> Document:
    """Return the results of runs on the named tasks, for the terminal."""
    results = [
        dataclasses.replace(each, tasks=[one for one in each.tasks if one.task in tasks])
        for each in run_results(records)
    ]
    rows = [
        [each.run, one.task, value.metric, _value(value), f"{value.items:,}"]
        for each in results
        for one in each.tasks
        for value in compare_arms([dataclasses.replace(each, tasks=[one])]).values
    ]
    found = compare_arms(results)
    blocks: list[Block] = [
        Table(["run", "task", "metric", "value", "items"], rows, (1, 2), tools=(SORT, COPY)),
        Note(ABOUT_VALUES),
        *(_differences(found, None) if len(results) > 1 else []),
        BulletList(found.notes),
        Paragraph(NO_VERDICT if len(results) > 1 else ""),
    ]
    return Document("", blocks)


def read_results(study_dir: Path, used: Sequence[Run]) -> list[TaskResults]:
    """Read the results of the counted runs, of their last weights."""
    found = [(run, read_final(study_dir / "runs" / run.name, run.record)) for run in used]
    return [
        TaskResults(run.name, run.variant, run.record.seed, record.tasks) for run, record in found if record
    ]


def downstream_section(study_dir: Path, used: Sequence[Run], variants: Sequence[str]) -> Section:
    """Return the section of a report; without content where no run was evaluated."""
    results = read_results(study_dir, used)
    if not results:
        return Section("Downstream tasks", [])
    found = compare_arms(results)
    rows: list[list[Text]] = [
        [
            color_label(value.arm, variants),
            value.task,
            value.metric,
            _value(value),
            f"{value.items:,}",
            str(len(value.seeds)),
        ]
        for value in found.values
    ]
    missing = [run.name for run in used if run.name not in {each.run for each in results}]
    note = f"Not evaluated: {', '.join(missing)}." if missing else ""
    harness = ", ".join(dict.fromkeys(one.harness for each in results for one in each.tasks))
    return Section("Downstream tasks", [
        Paragraph(f"Evaluated by lm-evaluation-harness {harness} (make lm-eval). {NO_VERDICT}"),
        Table(["variant", "task", "metric", "value", "items", "seeds"], rows, (1, 2), tools=(SORT, COPY)),
        Note(f"{ABOUT_VALUES} {ABOUT_MEANS}"),
        *_differences(found, variants),
        BulletList(found.notes, small=True),
        Note(note),
    ])  # fmt: skip


def downstream_json(study_dir: Path, used: Sequence[Run]) -> dict[str, Any]:
    """Return the same as plain data; {} where no run was evaluated."""
    results = read_results(study_dir, used)
    return {"downstream": dataclasses.asdict(compare_arms(results))} if results else {}


def across_section(studies: Sequence[tuple[str, Path, Sequence[Run]]]) -> Section:
    """Return the tasks of several studies, (label, folder, counted runs) each.

    Without content where fewer than two studies have results of a variant. A variant of a later study is compared with
    the same one of the first study, at the same seed.
    """
    labels = [label for label, _, _ in studies]
    by_variant: dict[str, list[TaskResults]] = {}
    for label, folder, used in studies:
        for each in read_results(folder, used):
            by_variant.setdefault(each.arm, []).append(dataclasses.replace(each, arm=label))
    rows: list[list[Text]] = []
    notes: dict[str, None] = {}
    for variant in sorted(by_variant, key=variant_order):
        if len({each.arm for each in by_variant[variant]}) < 2:
            continue
        found = compare_arms(by_variant[variant], labels[0])
        values = {(one.task, one.metric, one.arm): _value(one) for one in found.values}
        differences = {(one.task, one.metric, one.arm): _with_errors(one) for one in found.differences}
        notes |= dict.fromkeys(f"{variant}: {note}" for note in found.notes)
        for task, metric in dict.fromkeys((one.task, one.metric) for one in found.values):
            shown = [values.get((task, metric, label), "-") for label in labels]
            shown += [differences.get((task, metric, label), "-") for label in labels[1:]]
            rows.append([variant, task, metric, *shown])
    headings = ["variant", "task", "metric", *labels, *(f"{label} to {labels[0]}" for label in labels[1:])]
    about = Note(
        f"{ABOUT_VALUES} {ABOUT_MEANS} {ABOUT_DIFFERENCES.format(baseline='the first study')} {NO_VERDICT}"
    )
    return Section(
        "Downstream tasks", [Table(headings, rows, (1, 2)), about, BulletList(list(notes))] if rows else []
    )


def _with_errors(one: ArmDifference) -> str:
    errors = (f"± {_number(one.stderr_items, one)} items", f"± {_number(one.stderr_seeds, one)} seeds")
    return (
        f"{_number(one.difference, one, sign=True)} {', '.join(errors[: 1 + (one.stderr_seeds is not None)])}"
    )


def _differences(found: TaskComparison, variants: Sequence[str] | None) -> list[Block]:
    if not found.differences:
        several = len({value.arm for value in found.values}) > 1
        return [Paragraph(NO_PAIRS if several else "")]
    rows: list[list[Text]] = [
        [
            color_label(one.arm, variants) if variants else one.arm,
            one.task,
            f"ln {one.metric}" if one.kind == PERPLEXITY else one.metric,
            _number(one.difference, one, sign=True),
            _number(one.stderr_items, one),
            _number(one.stderr_seeds, one),
            str(len(one.seeds)),
        ]
        for one in found.differences
    ]
    baseline = found.differences[0].baseline
    headings = ["arm", "task", "metric", f"to {baseline}", "± items", "± seeds", "seeds"]
    single = any(one.stderr_seeds is None for one in found.differences)
    about = ABOUT_DIFFERENCES.format(baseline=baseline)
    return [Table(headings, rows, (1, 2)), Note(f"{about} {ONE_SEED}" if single else about)]


def _value(value: ArmValue) -> str:
    scale, unit, digits = (100, " %", 1) if value.share else (1, "", 4 if abs(value.value) < 100 else 1)
    error = "" if value.stderr is None else f" ± {scale * value.stderr:,.{digits}f}"
    chance, stderr = value.chance, value.stderr
    near = chance is not None and stderr is not None and abs(value.value - chance) <= 2 * stderr
    if abs(value.value) >= 1e6:
        return f"{value.value:.1e}{'' if stderr is None else f' ± {stderr:.1e}'}"
    return f"{scale * value.value:,.{digits}f}{error}{unit}{' †' if near else ''}"


def _number(number: float | None, one: ArmDifference, sign: bool = False) -> str:
    if number is None or not math.isfinite(number):
        return "-"
    scale, digits = (100, 2) if one.share else (1, 4)
    return f"{scale * number:{'+' if sign else ''}.{digits}f}"
