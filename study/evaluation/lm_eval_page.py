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

from referee.pages.document import Block, BulletList, Document, Note, Paragraph, Section, Table
from referee.pages.markup import Text
from referee.verdict.rows import Row
from referee.verdict.statistics import mean, standard_deviation
from runtime.records import read_items
from runtime.run_record import EVALUATIONS, LaterEvaluation, read_evaluation, run_name
from study.arm_colors import color_label
from study.runs import BASELINE, Run

CHANCE, TRUNCATED = "chance", "truncated"  # metrics: accuracy of guessing; share of rows over the block size
ACCURACY, PERPLEXITY = "mean", "perplexity"  # how a value follows from its items


@dataclass(frozen=True)
class Result:
    """A row of a task with the values of its single items; None where one is not a number."""

    row: Row
    items: np.ndarray | None = None
    harness: str = ""  # its version

    @property
    def right_or_wrong(self) -> bool:
        """Whether each item is 0 or 1."""
        return self.items is not None and bool(np.isin(self.items, (0.0, 1.0)).all())

    @property
    def kind(self) -> str:
        """How the value follows from the items: their mean, exp(-mean) (a perplexity), or "" for another way."""
        average, value = math.nan if self.items is None else mean(self.items.tolist()), self.row.value
        if math.isclose(average, value, rel_tol=1e-6, abs_tol=1e-9):
            return ACCURACY
        if -700 < average and math.isclose(math.exp(-average), value, rel_tol=1e-6):
            return PERPLEXITY
        return ""


def folder_of(run_dir: Path, task: str) -> Path:
    """Return the folder with the results of a task."""
    return run_dir / EVALUATIONS / f"lm-eval-{task}"


def results_of(found: LaterEvaluation) -> list[Result]:
    """Return the rows of an evaluation with their items."""
    harness = found.about["harness"] or ""
    return [Result(row, read_items(found.folder, row), harness) for row in found.rows]


@dataclass(frozen=True)
class ArmScore:
    """A metric of an arm, averaged over its seeds, or its difference from the baseline, paired by seed and by item.

    Perplexities are averaged geometrically; their difference is that of their logarithms, in nats per item. The two
    standard errors answer different questions: other items, or another training.
    """

    arm: str
    task: str
    metric: str
    kind: str
    share: bool  # each item is right or wrong
    value: float
    stderr_items: (
        float | None
    )  # over the items, for these trained models; None without the values of the items
    seeds: list[int]
    items: int
    baseline: str = ""  # "": the value of the arm
    stderr_seeds: float | None = None  # of a difference over the seeds; None for one seed
    chance: float | None = None  # of guessing


@dataclass(frozen=True)
class TaskComparison:
    """notes: results that were left out, and rows that were truncated."""

    values: list[ArmScore]
    differences: list[ArmScore]
    notes: list[str]


def compare_arms(results: Sequence[Result]) -> TaskComparison:
    """Average each arm and compare it with the baseline: B, or without it the first arm."""
    several = len({one.row.study for one in results}) > 1

    def named(row: Row, name: str) -> str:
        """Name an arm or a run: with its study where there are several."""
        return f"{row.study}/{name}" if several else name

    arms = list(dict.fromkeys(named(one.row, one.row.arm) for one in results))
    baseline = BASELINE if BASELINE in arms else next(iter(arms), "")
    found = TaskComparison([], [], [])
    for task in dict.fromkeys(one.row.dataset for one in results):
        of_task = [one.row for one in results if one.row.dataset == task]
        usual = Counter(row.data for row in of_task).most_common(1)[0][0]
        runs = {row: named(row, run_name(row.arm, row.seed)) for row in of_task}
        if others := dict.fromkeys(runs[row] for row in of_task if row.data != usual):
            found.notes.append(
                f"{task} leaves out {', '.join(others)}: other items or another version than most"
            )
        if cut := [
            f"{runs[row]} {row.value:.0%}" for row in of_task if row.metric == TRUNCATED and row.value
        ]:
            found.notes.append(
                f"{task}: rows longer than the block size lost their beginning: {', '.join(cut)}"
            )
        table: dict[str, dict[str, dict[int, Result]]] = {}  # metric -> arm -> seed
        for one in (one for one in results if one.row.data == usual):
            by_arm = table.setdefault(one.row.metric, {})
            by_arm.setdefault(named(one.row, one.row.arm), {})[one.row.seed] = one
        guessing = next((row.value for row in of_task if row.metric == CHANCE and row.data == usual), None)
        for by_arm in (by_arm for metric, by_arm in table.items() if metric not in (CHANCE, TRUNCATED)):
            for arm in (arm for arm in arms if arm in by_arm):
                found.values.append(_value(arm, by_arm[arm], guessing))
                if arm != baseline:
                    found.differences.extend(
                        _difference(arm, baseline, by_arm[arm], by_arm.get(baseline, {}))
                    )
    return found


def _value(arm: str, by_seed: dict[int, Result], chance: float | None) -> ArmScore:
    results = list(by_seed.values())
    row, kinds = results[0].row, {one.kind for one in results}
    value, stderr = mean([one.row.value for one in results]), None
    if kinds in ({ACCURACY}, {PERPLEXITY}):
        stderr = _item_error(np.array([one.items for one in results]).mean(axis=0))
    if kinds == {PERPLEXITY}:
        value = math.exp(mean([math.log(one.row.value) for one in results]))
        stderr = stderr and value * stderr
    share = all(one.right_or_wrong for one in results)
    about = (arm, row.dataset, row.metric, results[0].kind, share)
    return ArmScore(*about, value, stderr, sorted(by_seed), row.items, chance=chance if share else None)


def _difference(
    arm: str, baseline: str, by_seed: dict[int, Result], base: dict[int, Result]
) -> list[ArmScore]:
    seeds = sorted(by_seed.keys() & base.keys())
    pairs = [(by_seed[seed], base[seed]) for seed in seeds]
    kinds = {one.kind for pair in pairs for one in pair}
    if kinds not in ({ACCURACY}, {PERPLEXITY}):
        return []
    sign = -1.0 if kinds == {PERPLEXITY} else 1.0  # items of a perplexity are log-likelihoods
    rows = np.array([sign * (one.items - other.items) for one, other in pairs])  # type: ignore[operator]
    means = rows.mean(axis=1).tolist()
    share = all(one.right_or_wrong for pair in pairs for one in pair)
    row = pairs[0][0].row
    about = (arm, row.dataset, row.metric, pairs[0][0].kind, share)
    error = standard_deviation(means) / math.sqrt(len(seeds)) if len(seeds) > 1 else None
    return [
        ArmScore(*about, mean(means), _item_error(rows.mean(axis=0)), seeds, rows.shape[1], baseline, error)
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


def results_document(results: Sequence[Result]) -> Document:
    """Return the results of runs, for the terminal."""
    return Document("", [*_tables(compare_arms(results), ()), Paragraph(NO_VERDICT)])


def read_results(study_dir: Path, used: Sequence[Run]) -> list[Result]:
    """Read the results of the counted runs, of their last weights."""
    results = []
    for run in used:
        for folder in sorted(folder_of(run.file(study_dir, ""), "").parent.glob("lm-eval-*/")):
            found = read_evaluation(folder, run.record)
            if found and found.rows[0].tokens == run.record.progress.tokens:
                results += results_of(found)
    return results


def downstream_section(study_dir: Path, used: Sequence[Run], variants: Sequence[str]) -> Section:
    """Return the section of a report; without content where no run was evaluated."""
    results = read_results(study_dir, used)
    if not results:
        return Section("Downstream tasks", [])
    evaluated = {(one.row.arm, one.row.seed) for one in results}
    missing = [run.name for run in used if (run.variant, run.record.seed) not in evaluated]
    harness = ", ".join(dict.fromkeys(one.harness for one in results))
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
    }, (1, 2), sortable=True)  # fmt: skip
    differences = Table.of(found.differences, {
        "arm": lambda one: label(one.arm),
        "task": lambda one: one.task,
        "metric": lambda one: f"ln {one.metric}" if one.kind == PERPLEXITY else one.metric,
        "baseline": lambda one: one.baseline,
        "difference": lambda one: _number(one.value, one.share, sign=True),
        "± items": lambda one: _number(one.stderr_items, one.share),
        "± seeds": lambda one: _number(one.stderr_seeds, one.share),
        "seeds": lambda one: str(len(one.seeds)),
    }, (1, 2, 3))  # fmt: skip
    paired: list[Block] = [differences, Note(ABOUT_DIFFERENCES)] if found.differences else []
    return [values, Note(ABOUT_VALUES), *paired, BulletList(found.notes, small=True)]


def _value_text(value: ArmScore) -> str:
    chance, stderr = value.chance, value.stderr_items
    if abs(value.value) >= 1e6:
        return f"{value.value:.1e}" + ("" if stderr is None else f" ± {stderr:.1e}")
    scale, unit, digits = (100, " %", 1) if value.share else (1, "", 4 if abs(value.value) < 100 else 1)
    error = "" if stderr is None else f" ± {scale * stderr:,.{digits}f}"
    near = chance is not None and stderr is not None and abs(value.value - chance) <= 2 * stderr
    return f"{scale * value.value:,.{digits}f}{error}{unit}{' †' if near else ''}"


def _number(number: float | None, share: bool, sign: bool = False) -> str:
    if number is None or not math.isfinite(number):
        return "-"
    scale, digits = (100, 2) if share else (1, 4)
    return f"{scale * number:{'+' if sign else ''}.{digits}f}"
