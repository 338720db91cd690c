"""Build the comparison as a document for compare.html, compare.md and the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

from referee.numerics.setup.checklist_rows import EQUAL, counts, worst_first
from referee.pages.document import (
    HTML,
    MARKDOWN,
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
    render_markdown,
)
from referee.pages.figures import Plain, axis, figure, line
from referee.pages.html_page import render_html
from referee.pages.markup import Strong, Text, escape_html, number_with_detail
from referee.verdict.statistics import percent, with_interval
from runtime import files
from runtime.errors import UserError, disk_full
from study.analysis.verdict import Verdict
from study.arm_colors import color, legend
from study.compare.compare_sizes import sizes_section
from study.compare.compared_studies import (
    TOLERANCE,
    Alignment,
    Errors,
    StudyComparison,
    as_json,
    verdict_agreement,
)
from study.report.method import change, shown, shown_bits
from study.report.report_data import bits
from study.report.report_figures import Mark, forest
from study.report.report_sections import compared_section
from study.runs import variant_order

# Draw changes of perplexity and differences of training losses for plotly.


# In the order of the studies. The variants' own colors mean variants on every page.
STUDY_COLORS = ("var(--accent)", "var(--bad)", "var(--v8)", "var(--v6)", "var(--v7)", "var(--v9)")
NARROW = {"margin": {"l": 90, "r": 12}, "font": {"size": 11}}


def changes(comparison: StudyComparison) -> Plain | None:
    """Change of perplexity: a row for each variant, with an estimate for each study."""
    first, *others = labels = [study.label for study in comparison.studies]
    series = [f"{label} against {first}" for label in others] if comparison.absolute else labels
    marks = [
        Mark(variant, name, STUDY_COLORS[place % len(STUDY_COLORS)], interval)
        for variant, changed in comparison.changes()
        for place, (name, interval) in enumerate(zip(series, changed, strict=True))
        if interval
    ]
    return forest(marks)


def curves(lines: list[Alignment], variants: list[str]) -> Plain:
    """Relative difference of losses in percent against iteration, one line for each run, on a logarithmic axis.

    A zero leaves a gap: a logarithmic axis cannot show it.
    """
    data = [
        line(
            one.run,
            color(one.variant, variants),
            group=one.variant,
            width=1.6,
            x=list(one.curve),
            y=[float(f"{100 * value:.4g}") if value > 0 else None for value in one.curve.values()],
            hovertemplate=f"iteration %{{x}}: %{{y:.3g}} %<extra>{escape_html(one.run)}</extra>",
        )
        for one in lines
    ]
    end = max(one.iterations for one in lines)
    data.append(
        line("one percent", "var(--ink)", width=1.2, dash="dash", x=[1, end], y=[100 * TOLERANCE] * 2)
    )
    across = axis("iteration", exponentformat="SI", minexponent=4)
    upwards = axis("difference of the loss, %", type="log", nticks=7)
    return figure(data, 400, (66, 24, 12, 48), NARROW, xaxis=across, yaxis=upwards)


PAGES = (HTML, MARKDOWN)
VERDICTS = "The verdict of each study and the change of perplexity against its control arms."
CHANGES = "Paired by seed, with the 95 % interval. An open circle is one seed: no interval, no evidence."
ALIGNMENT = (
    "Relative difference of the training losses of the same run, against the first study: at the first step, and means "
    "over the first and the last tenth. A run parts where the difference and its running mean exceed one percent. A/A: "
    "the largest between two control arms of one seed; a first step beyond it means other weights, batches or "
    "precision. Curves of different experiments separate."
)


def comparison_document(comparison: StudyComparison) -> Document:
    """Return the whole comparison. The terminal leaves out equal entries of the checklist and downstream tasks."""
    studies = comparison.studies
    blocks: list[Block] = [
        Paragraph(_answer(comparison)),
        BulletList(comparison.reasons),
        _studies(comparison),
    ]
    if comparison.task == "grpo":
        blocks += [_verdict_section(comparison), _main_section(comparison), _checklist_section(comparison)]
    elif comparison.checks:
        held_out = {study.label: study.report.eval_sets for study in studies}
        blocks += [
            _verdict_section(comparison),
            _main_section(comparison),
            *([sizes_section(comparison.sizes)] if comparison.sizes else []),
            _bits_section(comparison),
            compared_section(held_out, _units(comparison)),
            _checklist_section(comparison),
            _alignment_section(comparison),
        ]
    blocks.append(_left_out_section(comparison))
    return Document(" | ".join(study.label for study in studies), blocks, subtitle="Comparison of studies")


def accuracy(value: float) -> str:
    """An accuracy in percent."""
    return f"{100 * value:.2f} %"


def accuracy_change(value: float) -> str:
    """A change of accuracy in percentage points."""
    return f"{100 * value:+.2f}"


def _answer(comparison: StudyComparison) -> Text:
    if not comparison.checks:
        return (Strong("Nothing to compare."),)
    if comparison.absolute:
        return (
            Strong("Comparable."),
            " Everything agrees that changes a loss, so losses are compared at equal tokens.",
        )
    return (
        Strong("Not comparable."),
        " Losses must not be compared: each study is compared with its control arms instead. What differs:",
    )


def _studies(comparison: StudyComparison) -> BulletList:
    """What each study trained, how many runs count, and its damaged files."""
    lines = []
    for study in comparison.studies:
        report = study.report
        lines.append(
            f"{study.label}: {len(report.used)} of {len(report.runs)} runs count. {report.experiment.text}"
        )
        lines += [f"{study.label}: {line}" for line in (*report.damaged, *study.notes)]
    return BulletList(
        [*lines, *(f"{one.excludes} is excluded: {one.reason}" for one in comparison.checks if one.excludes)]
    )


def _verdict_section(comparison: StudyComparison) -> Section:
    """The verdicts of the studies on each judged arm, and whether they agree."""
    tables = [{one.variant: one for one in study.report.verdicts} for study in comparison.studies]
    names = sorted({name for table in tables for name in table}, key=variant_order)

    def cell(verdict: Verdict | None) -> str:
        text = percent if comparison.task == "gpt2" else accuracy_change
        return f"{verdict.word}, {text(verdict.test.difference.mean)}" if verdict else "-"

    rows = [
        [
            name,
            *(cell(table.get(name)) for table in tables),
            verdict_agreement([table[name].word for table in tables if name in table]),
        ]
        for name in names
    ]
    headings = ["arm", *(study.label for study in comparison.studies), "the studies"]
    return Section("Verdicts", [Table(headings, rows, (1 + len(tables),)), Note(VERDICTS)] if rows else [])


def _main_section(comparison: StudyComparison) -> Section:
    title = "At equal tokens" if comparison.absolute else "Each study against its control arms"
    if comparison.task == "grpo":
        return Section("Accuracy", [_main_table(comparison)] if comparison.absolute else [])
    return Section(title, [Figure("changes", changes(comparison), CHANGES), _main_table(comparison)])


def _main_table(comparison: StudyComparison) -> Table:
    """Perplexities and changes to the first study, or changes to each study's control arms."""
    labels = [study.label for study in comparison.studies]
    rows: list[list[Text]]
    if not comparison.absolute:
        rows = [
            [row.variant, *(number_with_detail(change(one, row.control)) for one in row.against_controls)]
            for row in comparison.relative
        ]
        return Table(["variant", *(f"{label} against control arms" for label in labels)], rows, sortable=True)
    value, changed = shown, partial(change, control=False)
    if comparison.task == "grpo":
        value, changed = (partial(with_interval, text=text) for text in (accuracy, accuracy_change))
    rows = [
        [
            row.variant,
            str(len(row.seeds)),
            *(number_with_detail(value(loss)) for loss in row.losses),
            *(number_with_detail(changed(difference)) for difference in row.differences),
        ]
        for row in comparison.absolute
    ]
    changes = [f"{label} against {labels[0]}" for label in labels[1:]]
    return Table(["variant", "seeds", *labels, *changes], rows, sortable=True)


def _bits_section(comparison: StudyComparison) -> Section:
    """Show the final bits per byte; without rows where no record has them."""
    tables = [
        {
            row.variant: shown_bits(interval)
            for row in study.report.rows
            if (interval := bits(study.report, row.final_loss))
        }
        for study in comparison.studies
    ]
    names = sorted({name for table in tables for name in table}, key=variant_order)
    rows = [[name, *(number_with_detail(table.get(name, "-")) for table in tables)] for name in names]
    headings = ["variant", *(study.label for study in comparison.studies)]
    about = Note(f"After the last update, mean over seeds [95 % interval]. A target is {_units(comparison)}.")
    return Section("Bits per byte", [Table(headings, rows), about] if rows else [])


def _units(comparison: StudyComparison) -> str:
    """Name the token of each study, once where all have the same."""
    units = {study.report.unit for study in comparison.studies}
    if len(units) == 1:
        return f"one {units.pop()} in every study"
    return ", ".join(f"{study.label}: one {study.report.unit}" for study in comparison.studies)


def _checklist_section(comparison: StudyComparison) -> Section:
    """Show the entries that differ, the worst first, then the equal ones behind a fold."""
    labels = [study.label for study in comparison.studies]
    checks = worst_first(comparison.checks)
    differing = [[one.subject, one.status, *one.values, one.reason] for one in checks if one.status != EQUAL]
    equal = [[one.subject, one.values[0]] for one in checks if one.status == EQUAL]
    columns = tuple(range(1, 3 + len(labels)))
    folded = Details(f"{len(equal)} entries that are equal", [Table(["entry", "value"], equal, (1,))])
    table = [Table(["entry", "status", *labels, "reason"], differing, columns)] if differing else []
    return Section("Checklist", [Paragraph(f"{counts(checks)}."), *table, Only(PAGES, [folded])])


def _alignment_section(comparison: StudyComparison) -> Section:
    """Training losses of each other study against those of the first."""
    variants = list(dict.fromkeys(line.variant for line in comparison.alignments))
    blocks: list[Block] = [Note(ALIGNMENT), legend(variants)] if variants else []
    first, *others = (study.label for study in comparison.studies)
    for number, other in enumerate(others):
        lines = [line for line in comparison.alignments if line.studies == (first, other)]
        within = sum(line.within_tolerance for line in lines)
        blocks.append(Paragraph(f"{other}: {within} of {len(lines)} runs within one percent."))
        if lines:
            caption = f"{first} and {other}, running mean. Dashed: one percent."
            blocks += [
                Figure(f"curves{number}", curves(lines, variants), caption),
                alignment_table(lines),
            ]
    return Section("Do the training losses coincide?", blocks)


def alignment_table(lines: list[Alignment]) -> Table:
    """One row for each run of a pair of studies."""
    columns: dict[str, Callable[[Alignment], Text]] = {
        "run": lambda line: line.run,
        "steps": lambda line: f"{line.iterations:,}",
        "differs": lambda line: _step(line.differs_from),
        "parts": lambda line: _step(line.parts_from),
        "first step / tenth / last tenth, %": lambda line: _percents(line.errors),
        "A/A": lambda line: _percents(line.control_errors) if line.control_errors else "-",
        "within A/A": lambda line: {True: "yes", False: "no", None: "-"}[line.within_control_errors],
    }
    return Table.of(lines, columns)


def _percents(errors: Errors) -> str:
    return " / ".join(f"{100 * error:.2g}" for error in dataclasses.astuple(errors))


def _step(iteration: int | None) -> str:
    return "never" if iteration is None else f"{iteration:,}"


def _left_out_section(comparison: StudyComparison) -> Section:
    """Runs that count in no number, and those whose final loss does not."""
    rows = [
        [study.label, run.name, run.cause or run.status, run.why_not]
        for study in comparison.studies
        for run in study.report.uncounted
    ]
    rows += [
        [
            study.label,
            run.name,
            "cut",
            "it ended before its schedule; where others did not, its final loss does not count",
        ]
        for study in comparison.studies
        for run in study.report.used
        if run.record.truncated
    ]
    table = Table(["study", "run", "status", "reason"], rows, (0, 1, 2, 3), sortable=True)
    return Section("Runs that are not counted", [table] if rows else [])


def write_comparison(comparison: StudyComparison, directory: Path) -> list[Path]:
    """compare.json, compare.md and compare.html in `directory`, each replaced at once; the paths written."""
    document = comparison_document(comparison)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_json(directory / "compare.json", as_json(comparison))
        files.write_text(directory / "compare.md", render_markdown(document))
        files.write_text(directory / "compare.html", render_html(document))
    except OSError as error:
        if disk_full(error):  # run_command names the fix
            raise
        raise UserError(
            f"{directory} cannot be written: {error.strerror}; fix: OUT=FOLDER with write permission"
        ) from error
    return [directory / name for name in ("compare.json", "compare.md", "compare.html")]
