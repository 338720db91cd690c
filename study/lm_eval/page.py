"""Results of lm-evaluation-harness as blocks of a document: for the terminal, for reports. Needs no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from referee.pages.document import COPY, SORT, Block, BulletList, Document, Note, Paragraph, Section, Table
from referee.pages.markup import Text
from study.arm_colors import color_label
from study.lm_eval.pairs import ArmDifference, ArmValue, TaskComparison, TaskResults, compare_arms
from study.lm_eval.records import PERPLEXITY, LmEvalRecord, read_final
from study.records.runs import Run, variant_order

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
