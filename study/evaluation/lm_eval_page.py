"""Results of lm-evaluation-harness from the rows of runs, as blocks of a document: for the terminal, for reports."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from referee.pages.document import COPY, SORT, Block, BulletList, Document, Note, Paragraph, Section, Table
from referee.pages.markup import Text
from referee.verdict.statistics import mean, standard_deviation
from runtime.records import read_items
from runtime.run_record import EVALUATIONS, LaterEvaluation, read_evaluation
from study.arm_colors import color_label
from study.runs import BASELINE, Run

CHANCE, TRUNCATED = (
    "chance",
    "truncated",
)  # metrics: accuracy of guessing; share of rows longer than the block size
ACCURACY, PERPLEXITY = "mean", "perplexity"  # how a value follows from its items


@dataclass(frozen=True)
class Metric:
    """A metric of a task. name: as the harness names it; a filter of the answers follows a comma.

    items: the value of each item; None where one is not a number.
    """

    name: str
    value: float
    items: np.ndarray | None = None

    @property
    def right_or_wrong(self) -> bool:
        """Whether each item is 0 or 1."""
        return self.items is not None and bool(np.isin(self.items, (0.0, 1.0)).all())

    @property
    def kind(self) -> str:
        """How `value` follows from the items: their mean, exp(-mean) (a perplexity), or "" for another way."""
        average = math.nan if self.items is None else mean(self.items.tolist())
        if math.isclose(average, self.value, rel_tol=1e-6, abs_tol=1e-9):
            return ACCURACY
        if -700 < average and math.isclose(math.exp(-average), self.value, rel_tol=1e-6):
            return PERPLEXITY
        return ""


@dataclass(frozen=True)
class TaskResult:
    """The results of a task. data: its name, and the digest of what it asks and of its items."""

    task: str
    data: str
    harness: str
    items: int
    metrics: Sequence[Metric]
    truncated: float = 0.0  # share of the rows
    chance: float | None = None


@dataclass(frozen=True)
class TaskResults:
    """The results of a run. arm: the name under which its seeds are averaged."""

    run: str
    arm: str
    seed: int
    tasks: Sequence[TaskResult]


def folder_of(run_dir: Path, task: str) -> Path:
    """Return the folder with the results of a task."""
    return run_dir / EVALUATIONS / f"lm-eval-{task}"


def task_result(found: LaterEvaluation) -> TaskResult:
    """Return the results of a task from its rows."""
    values = {row.metric: row.value for row in found.rows}
    rows = [row for row in found.rows if row.metric not in (CHANCE, TRUNCATED)]
    return TaskResult(
        rows[0].dataset,
        rows[0].data,
        found.about["harness"] or "",
        rows[0].items,
        [Metric(row.metric, row.value, read_items(found.folder, row)) for row in rows],
        values[TRUNCATED],
        values.get(CHANCE),
    )


@dataclass(frozen=True)
class ArmValue:
    """A metric of an arm, averaged over its seeds: perplexities geometrically."""

    arm: str
    task: str
    metric: str
    kind: str
    share: bool  # each item is right or wrong
    value: float
    stderr: float | None  # over the items, of this average; None without the values of the items
    seeds: list[int]
    items: int
    chance: float | None  # of guessing


@dataclass(frozen=True)
class ArmDifference:
    """Arm minus baseline, paired by seed and by item. Of a perplexity: of its logarithm, in nats per item.

    The two standard errors answer different questions: other items, or another training.
    """

    arm: str
    baseline: str
    task: str
    metric: str
    kind: str
    share: bool
    difference: float
    stderr_items: float | None  # over the items, for these trained models
    stderr_seeds: float | None  # over the seeds; None for one seed
    seeds: list[int]
    items: int


@dataclass(frozen=True)
class TaskComparison:
    """notes: results that were left out, and rows that were truncated."""

    values: list[ArmValue]
    differences: list[ArmDifference]
    notes: list[str]


def compare_arms(results: Sequence[TaskResults]) -> TaskComparison:
    """Average each arm and compare it with the baseline: B, or without it the first arm."""
    arms = list(dict.fromkeys(result.arm for result in results))
    baseline = BASELINE if BASELINE in arms else next(iter(arms), "")
    notes: list[str] = []
    values: list[ArmValue] = []
    differences: list[ArmDifference] = []
    for task in dict.fromkeys(one.task for result in results for one in result.tasks):
        found = {(r.arm, r.seed): (r, one) for r in results for one in r.tasks if one.task == task}
        most = Counter(one.data for _, one in found.values()).most_common(1)[0][0]
        others = [r.run for r, one in found.values() if one.data != most]
        if others:
            notes.append(f"{task} leaves out {', '.join(others)}: other items or another version than most")
        cut = [f"{r.run} {one.truncated:.0%}" for r, one in found.values() if one.truncated]
        if cut:
            notes.append(f"{task}: rows longer than the block size lost their beginning: {', '.join(cut)}")
        same = {key: one for key, (_, one) in found.items() if one.data == most}
        for name in dict.fromkeys(metric.name for one in same.values() for metric in one.metrics):
            metrics = {key: m for key, one in same.items() for m in one.metrics if m.name == name}
            result = next(iter(same.values()))
            for arm in arms:
                by_seed = {seed: metric for (other, seed), metric in metrics.items() if other == arm}
                base = {seed: metric for (other, seed), metric in metrics.items() if other == baseline}
                if by_seed:
                    values.append(_value(arm, result, by_seed))
                if arm != baseline:
                    differences += _difference(arm, baseline, result, by_seed, base)
    return TaskComparison(values, differences, notes)


def _value(arm: str, result: TaskResult, by_seed: dict[int, Metric]) -> ArmValue:
    metrics = list(by_seed.values())
    first, kinds = metrics[0], {metric.kind for metric in metrics}
    value, stderr = mean([metric.value for metric in metrics]), None
    if kinds in ({ACCURACY}, {PERPLEXITY}):
        stderr = _item_error(np.array([metric.items for metric in metrics]).mean(axis=0))
    if kinds == {PERPLEXITY}:
        value = math.exp(mean([math.log(metric.value) for metric in metrics]))
        stderr = stderr and value * stderr
    share = all(metric.right_or_wrong for metric in metrics)
    chance = result.chance if share else None
    about = (arm, result.task, first.name, first.kind, share)
    return ArmValue(*about, value, stderr, sorted(by_seed), result.items, chance)


def _difference(
    arm: str, baseline: str, result: TaskResult, by_seed: dict[int, Metric], base: dict[int, Metric]
) -> list[ArmDifference]:
    seeds = sorted(by_seed.keys() & base.keys())
    pairs = [(by_seed[seed], base[seed]) for seed in seeds]
    kinds = {metric.kind for pair in pairs for metric in pair}
    if kinds not in ({ACCURACY}, {PERPLEXITY}):
        return []
    sign = -1.0 if kinds == {PERPLEXITY} else 1.0  # items of a perplexity are log-likelihoods
    rows = np.array([sign * (one.items - other.items) for one, other in pairs])  # type: ignore[operator]
    means = rows.mean(axis=1).tolist()
    share = all(metric.right_or_wrong for pair in pairs for metric in pair)
    first = pairs[0][0]
    return [
        ArmDifference(
            arm=arm,
            baseline=baseline,
            task=result.task,
            metric=first.name,
            kind=first.kind,
            share=share,
            difference=mean(means),
            stderr_items=_item_error(rows.mean(axis=0)),
            stderr_seeds=standard_deviation(means) / math.sqrt(len(seeds)) if len(seeds) > 1 else None,
            seeds=seeds,
            items=rows.shape[1],
        )
    ]


def _item_error(items: Any) -> float | None:
    """Standard error of the mean over the items; None for a single one."""
    return float(items.std(ddof=1) / math.sqrt(items.size)) if items.size > 1 else None


NO_VERDICT = (
    "No verdict follows from these numbers: the study declared the validation loss as its comparison before the first "
    "run, and among many tasks and metrics some differences exceed two standard errors by chance."
)
ABOUT_VALUES = (
    "Mean over the seeds ± one standard error over the items; more seeds do not shrink it. † within two of them of "
    "guessing, so no sign of skill."
)
ABOUT_DIFFERENCES = (
    "Arm minus baseline at the same seed and on the same items: accuracies in percentage points, perplexities as the "
    "difference of their logarithms. ± items: one standard error over the items, for these trained models. ± seeds: "
    "over the seeds, for another training."
)


def results_document(results: Sequence[TaskResults]) -> Document:
    """Return the results of runs, for the terminal."""
    return Document("", [*_tables(compare_arms(results), ()), Paragraph(NO_VERDICT)])


def read_results(study_dir: Path, used: Sequence[Run]) -> list[TaskResults]:
    """Read the results of the counted runs, of their last weights."""
    found = []
    for run in used:
        folders = sorted(folder_of(run.file(study_dir, ""), "").parent.glob("lm-eval-*/"))
        read = [one for folder in folders if (one := read_evaluation(folder, run.record))]
        tasks = [task_result(one) for one in read if one.rows[0].tokens == run.record.progress.tokens]
        if tasks:
            found.append(TaskResults(run.name, run.variant, run.record.seed, tasks))
    return found


def downstream_section(study_dir: Path, used: Sequence[Run], variants: Sequence[str]) -> Section:
    """Return the section of a report; without content where no run was evaluated."""
    results = read_results(study_dir, used)
    if not results:
        return Section("Downstream tasks", [])
    missing = [run.name for run in used if run.name not in {each.run for each in results}]
    harness = ", ".join(dict.fromkeys(one.harness for each in results for one in each.tasks))
    return Section("Downstream tasks", [
        Paragraph(f"Evaluated by lm-evaluation-harness {harness} (make lm-eval). {NO_VERDICT}"),
        *_tables(compare_arms(results), variants),
        Note(f"Not evaluated: {', '.join(missing)}." if missing else ""),
    ])  # fmt: skip


def downstream_json(study_dir: Path, used: Sequence[Run]) -> dict[str, Any]:
    """Return the same as plain data; {} where no run was evaluated."""
    results = read_results(study_dir, used)
    return {"downstream": dataclasses.asdict(compare_arms(results))} if results else {}


def _tables(found: TaskComparison, variants: Sequence[str]) -> list[Block]:
    """Return values, differences and notes. variants: those with a color."""

    def label(arm: str) -> Text:
        return color_label(arm, variants) if arm in variants else arm

    values = Table.of(found.values, {
        "arm": lambda one: label(one.arm),
        "task": lambda one: one.task,
        "metric": lambda one: one.metric,
        "value": _value_text,
        "items": lambda one: f"{one.items:,}",
        "seeds": lambda one: str(len(one.seeds)),
    }, (1, 2), (SORT, COPY))  # fmt: skip
    differences = Table.of(found.differences, {
        "arm": lambda one: label(one.arm),
        "task": lambda one: one.task,
        "metric": lambda one: f"ln {one.metric}" if one.kind == PERPLEXITY else one.metric,
        "baseline": lambda one: one.baseline,
        "difference": lambda one: _number(one.difference, one.share, sign=True),
        "± items": lambda one: _number(one.stderr_items, one.share),
        "± seeds": lambda one: _number(one.stderr_seeds, one.share),
        "seeds": lambda one: str(len(one.seeds)),
    }, (1, 2, 3))  # fmt: skip
    paired: list[Block] = [differences, Note(ABOUT_DIFFERENCES)] if found.differences else []
    return [values, Note(ABOUT_VALUES), *paired, BulletList(found.notes, small=True)]


def _value_text(value: ArmValue) -> str:
    if abs(value.value) >= 1e6:
        return f"{value.value:.1e}" + ("" if value.stderr is None else f" ± {value.stderr:.1e}")
    scale, unit, digits = (100, " %", 1) if value.share else (1, "", 4 if abs(value.value) < 100 else 1)
    error = "" if value.stderr is None else f" ± {scale * value.stderr:,.{digits}f}"
    chance, stderr = value.chance, value.stderr
    near = chance is not None and stderr is not None and abs(value.value - chance) <= 2 * stderr
    return f"{scale * value.value:,.{digits}f}{error}{unit}{' †' if near else ''}"


def _number(number: float | None, share: bool, sign: bool = False) -> str:
    if number is None or not math.isfinite(number):
        return "-"
    scale, digits = (100, 2) if share else (1, 4)
    return f"{scale * number:{'+' if sign else ''}.{digits}f}"
