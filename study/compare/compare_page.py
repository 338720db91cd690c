"""Build the comparison as a document for compare.html, compare.md and the terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from referee.numerics.setup.checklist_rows import (
    EQUAL,
    FATAL,
    NOT_RECORDED,
    ChecklistRow,
    counts,
    worst_first,
)
from referee.pages.document import (
    COPY,
    FILTER,
    HTML,
    MARKDOWN,
    SORT,
    TERMINAL,
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
from referee.pages.html_page import render_html
from referee.pages.markup import Detail, Strong, Text, number_with_detail
from referee.verdict.statistics import perplexity
from runtime import files
from runtime.errors import UserError, disk_full
from study.arm_colors import legend
from study.compare import compare_figures as figures
from study.compare.alignment import TOLERANCE, Alignment
from study.compare.compare_sentences import error, order_note, ranking_note, sentences, table_introduction
from study.compare.compare_sizes import sizes_section
from study.compare.compared_studies import StudyComparison, as_json
from study.evaluation.lm_eval_page import across_section
from study.report.eval_set_section import compared_section
from study.report.report_data import bits
from study.report.report_sentences import change, shown, shown_bits
from study.runs import variant_order

PAGES = (HTML, MARKDOWN)
ALIGNMENT = (
    "Relative difference of the training losses of the same run in two studies: at the first shared iteration, and as "
    "means over the first and the last tenth. A/A is the largest such difference between two control arms of one seed "
    "in either study. Control arms start as different functions of the same weights. A first step beyond A/A therefore "
    "means different weights, batches or precision. A curve parts at the first iteration at which the difference and "
    "its running mean are above the limit."
)
RANKING = (
    "Noise permits a range of places for each variant. Control arms share their mean and one range. A real change is "
    "above or below them by its study's own verdict. Two real changes differ by a paired t test over the seeds, "
    "adjusted by Holm's method over the pairs. The table shows the variants that all studies have. Studies agree on a "
    "variant if they separate it from the same other variants in the same direction."
)


def comparison_document(comparison: StudyComparison) -> Document:
    """Return the whole comparison; the terminal leaves out explanations and shows short tables."""
    title = " | ".join(study.label for study in comparison.studies)
    trained = [f"{study.label}: {study.report.experiment.text}" for study in comparison.studies]
    blocks: list[Block] = [BulletList(sentences(comparison)), BulletList(trained, small=True)]
    if comparison.checks:
        blocks += [
            _main_section(comparison),
            *([sizes_section(comparison.sizes)] if comparison.sizes else []),
            _bits_section(comparison),
            compared_section(
                {study.label: study.report.eval_sets for study in comparison.studies}, _units(comparison)
            ),
            Only(PAGES, [across_section([(one.label, one.path, one.used) for one in comparison.studies])]),
            _checklist_section(comparison),
            _alignment_section(comparison),
            _order_section(comparison),
        ]
    blocks.append(Only(PAGES, _run_sections(comparison)))
    return Document(title, blocks, subtitle="Comparison of studies")


# ---- sections


def _main_section(comparison: StudyComparison) -> Section:
    title = "At equal tokens" if comparison.absolute else "Each study against its own control arms"
    caption = (
        "Change of perplexity with its 95 % interval. An open circle is one seed: no interval, no evidence."
    )
    return Section(
        title,
        [
            Paragraph(table_introduction(comparison)),
            Figure("changes", figures.changes(comparison), caption),
            Only(PAGES, [_main_table(comparison)]),
            Only((TERMINAL,), [_main_table(comparison, brief=True)]),
        ],
    )


def _bits_section(comparison: StudyComparison) -> Section:
    """Show the final bits per byte; without rows where no record has them."""
    found: dict[str, dict[str, str]] = {}
    for study in comparison.studies:
        for row in study.report.rows:
            if interval := bits(study.report, row.final_loss):
                found.setdefault(row.variant, {})[study.label] = shown_bits(interval)
    labels = [study.label for study in comparison.studies]
    units = _units(comparison)
    rows: list[list[Text]] = [
        [name, *(number_with_detail(found[name].get(label, "-")) for label in labels)]
        for name in sorted(found, key=variant_order)
    ]
    about = Note(
        f"After the last update, mean over seeds [95 % interval]. A target is {units}. Bits per byte do not depend on "
        "the tokenizer, but each study has its validation text."
    )
    return Section("Bits per byte", [Table(["variant", *labels], rows), about] if rows else [])


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
    differing = [[check.subject, _status(check), *check.values] for check in checks if check.status != EQUAL]
    equal = [[check.subject, *check.values] for check in checks if check.status == EQUAL]
    columns = tuple(range(1, 2 + len(labels)))
    table = Table(["entry", *labels], equal, columns[:-1])
    tables: list[Block] = [
        Table(["entry", "status", *labels], differing, columns),
        Details(f"{len(equal)} entries that are equal", [table]),
    ]
    lines = Only((TERMINAL,), [BulletList(_check_lines(checks))])
    return Section("Checklist", [Paragraph(f"{counts(checks)}."), Only(PAGES, tables), lines])


def _check_lines(checks: list[ChecklistRow]) -> list[str]:
    """Describe the entries that differ. Harmless entries that are not recorded share one line."""
    silent = [check.subject for check in checks if check.status == NOT_RECORDED and not check.blocks]
    lines = [
        f"{check.status}: {check.subject}: {' | '.join(check.values)} ({check.reason})"
        for check in checks
        if check.status != EQUAL and check.subject not in silent
    ]
    if silent:
        lines.append(f"{NOT_RECORDED}, so only the losses can show a difference: {', '.join(silent)}")
    return lines


def _alignment_section(comparison: StudyComparison) -> Section:
    variants = list(dict.fromkeys(line.variant for line in comparison.alignments))
    pairs = {names: lines for names, lines in comparison.pairs().items() if lines}
    blocks: list[Block] = [Only(PAGES, [Paragraph(ALIGNMENT)]), legend(variants)] if pairs else []
    for number, (names, lines) in enumerate(pairs.items()):
        caption = (
            f"{names}: relative difference of the training losses of the same run, running mean. Dashed: "
            f"{error(TOLERANCE)}. Dotted: the largest difference between two control arms of one study at one seed."
        )
        details = Details(f"{names}: {len(lines)} runs in numbers", [alignment_table(lines)])
        brief: list[Block] = [Paragraph(names), alignment_table(lines, brief=True)]
        blocks += [
            Figure(f"curves{number}", figures.curves(lines, variants), caption),
            Only(PAGES, [details]),
            Only((TERMINAL,), brief),
        ]
    if unreadable := sum(line.unreadable for line in comparison.alignments):
        blocks.append(Paragraph(f"{unreadable} unreadable lines of metrics.jsonl were skipped."))
    return Section("Do the training losses coincide?", blocks)


def _order_section(comparison: StudyComparison) -> Section:
    about = Only(PAGES, [Paragraph(RANKING)])
    notes = BulletList([note for ranking in comparison.rankings if (note := ranking_note(ranking))])
    return Section(
        "Order of the variants", [about, Paragraph(order_note(comparison)), _order_table(comparison), notes]
    )


def _run_sections(comparison: StudyComparison) -> list[Section]:
    rows = [
        [study.label, run.name, run.status, run.why_not]
        for study in comparison.studies
        for run in study.report.uncounted
    ]
    table = Table(["study", "run", "status", "reason"], rows, (0, 1, 2, 3), tools=(SORT, FILTER))
    notes = [f"{study.label}: {note}" for study in comparison.studies for note in study.notes]
    none = Paragraph("" if rows else "None: every run counts.")
    return [Section("Runs that are not counted", [table, none]), Section("Notes", [BulletList(notes)])]


# ---- tables


def _main_table(comparison: StudyComparison, brief: bool = False) -> Table:
    """Losses and changes, or changes to each study's control arms. brief: losses without interval."""
    labels = [study.label for study in comparison.studies]
    rows: list[list[Text]]
    if not comparison.absolute:
        rows = [
            [row.variant, *(number_with_detail(change(one, row.control)) for one in row.against_controls)]
            for row in comparison.relative
        ]
        headings = ["variant", *(f"{label}: against its control arms" for label in labels)]
        return Table(headings, rows, tools=(SORT, COPY))
    rows = [
        [
            row.variant,
            str(len(row.seeds)),
            f"{row.tokens:,}",
            *(perplexity(loss.mean) if brief else number_with_detail(shown(loss)) for loss in row.losses),
            *(number_with_detail(change(difference, False)) for difference in row.differences),
        ]
        for row in comparison.absolute
    ]
    changes = [f"{label} against {labels[0]}" for label in labels[1:]]
    return Table(["variant", "seeds", "tokens", *labels, *changes], rows, tools=(SORT, COPY))


def alignment_table(lines: list[Alignment], brief: bool = False) -> Table:
    """One row for each run of a pair of studies. brief: the columns that fit into a terminal."""
    headings = [
        "run", "iterations", "first step", "first tenth", "last tenth", f"within {error(TOLERANCE)}",
        f"parts: {error(TOLERANCE)}", "parts: A/A", "A/A first step", "A/A first tenth", "A/A last tenth",
    ]  # fmt: skip

    def parts(at: int | None) -> str:
        return f"{at:,}" if at else "never"

    rows = []
    for line in lines:
        row = [line.run, f"{line.iterations:,}", *map(error, dataclasses.astuple(line.errors))]
        row += ["yes" if line.within_tolerance else "no", parts(line.parts_from_tolerance)]
        if line.envelope:
            row += [parts(line.parts_from_envelope), *map(error, dataclasses.astuple(line.envelope))]
        rows.append(row + ["-"] * (len(headings) - len(row)))
    columns = 8 if brief else len(headings)
    return Table(headings[:columns], [row[:columns] for row in rows])


def _order_table(comparison: StudyComparison) -> Table:
    """The places that noise permits each variant in each study; empty without a place."""
    rows = [
        [
            f"{row.variant} (control)" if row.control else row.variant,
            *(_range(*places) if places else "-" for places in row.places),
            row.agreement,
        ]
        for row in comparison.across
        if any(row.places)
    ]
    labels = [f"places in {study.label}" for study in comparison.studies]
    return Table(["variant", *labels, "the studies"], rows, (1 + len(labels),))


def _status(check: ChecklistRow) -> Text:
    """The status of a row with its reason, for a table."""
    status = Strong(FATAL, bad=True) if check.status == FATAL else check.status
    return (status, Detail(f"({check.reason})")) if check.reason else status


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


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
