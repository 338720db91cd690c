"""A comparison as a document: sentences, tables and figures for compare.html, compare.md and the terminal."""

from __future__ import annotations

from pages.components import legend
from pages.document import (
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Paragraph,
    Section,
    Table,
)
from pages.markup import Detail, Strong, Text, number_with_detail
from study.compare import figures
from study.compare.alignment import RULE, Alignment
from study.compare.build import StudyComparison
from study.compare.checklist import EQUAL, FATAL, HARMLESS, NOT_RECORDED, Check
from study.compare.ranking import Ranking
from study.compare.sentences import above_table, counts, error, order_note, ranking_note, sentences
from study.records.runs import BASELINE
from study.report.sentences import change, perplexity, shown

ALIGNMENT = (
    "Relative difference of the training losses of the same run in two studies: at the first shared iteration, and as "
    "means over the first and the last tenth. A/A is the largest such difference between two control arms of one seed "
    "in either study. Control arms start as different functions of the same weights. A first step beyond A/A therefore "
    "means different weights, batches or precision. A curve parts at the first iteration from which the difference and "
    "the mean of all later ones are beyond the limit."
)
RANKING = (
    "A place is known only as far as noise permits. Control arms share their mean and one range of places. A real "
    "change is above or below them by its study's own verdict. Two real changes differ by a paired t test over the "
    "seeds, adjusted by Holm's method over the pairs."
)
ACROSS = (
    "Places that noise permits, among the variants that all studies have. The studies agree on a variant where they "
    "separate it from the same other variants in the same direction."
)
WORST_FIRST = (FATAL, NOT_RECORDED, HARMLESS, EQUAL)


def comparison_document(comparison: StudyComparison) -> Document:
    """compare.html and compare.md."""
    title = " | ".join(study.label for study in comparison.studies)
    blocks: list[Block] = [BulletList(sentences(comparison))]
    if comparison.checks:
        blocks += [
            _main_section(comparison),
            _checklist_section(comparison),
            _alignment_section(comparison),
            _order_section(comparison),
        ]
    return Document(title, [*blocks, *_run_sections(comparison)], subtitle="Studies side by side")


def terminal_document(comparison: StudyComparison) -> Document:
    """The comparison in short: sentences, checklist, main table, curves and order."""
    blocks: list[Block] = [BulletList(sentences(comparison))]
    if comparison.checks:
        blocks += [
            Section(f"checklist: {counts(comparison)}", [BulletList(_check_lines(comparison))]),
            Paragraph(above_table(comparison)),
            main_table(comparison, brief=True),
        ]
        blocks += [
            Section(f"training losses at equal iterations, {names}", [alignment_table(lines, brief=True)])
            for names, lines in pairs(comparison)
        ]
        for ranking in comparison.rankings:
            blocks.append(Paragraph(ranking_note(ranking)))
            blocks += [ranking_table(ranking)] if ranking.places else []
        blocks.append(Paragraph(order_note(comparison)))
    return Document("", blocks)


# ---- sections


def _main_section(comparison: StudyComparison) -> Section:
    title = "At equal tokens" if comparison.absolute else f"Against each study's {BASELINE}"
    blocks: list[Block] = [Paragraph(above_table(comparison))]
    if drawn := figures.changes(comparison):
        caption = "Change of perplexity with its 95 % interval. An open circle is one seed: no interval, no evidence."
        blocks.append(Figure("changes", drawn, caption))
    return Section(title, [*blocks, main_table(comparison)])


def _checklist_section(comparison: StudyComparison) -> Section:
    """The rows that differ, the worst first, and the equal rows behind a fold."""
    labels = [study.label for study in comparison.studies]
    differing, equal = [], []
    for check in sorted(
        comparison.checks, key=lambda check: (WORST_FIRST.index(check.status), not check.blocks)
    ):
        if check.status == EQUAL:
            equal.append([check.subject, *check.values])
        else:
            differing.append([check.subject, _status(check), *check.values])
    columns = range(1, 2 + len(labels))
    blocks: list[Block] = [Paragraph(f"{counts(comparison)}.")]
    if differing:
        blocks.append(Table(["must agree", "status", *labels], differing, tuple(columns)))
    if equal:
        table = Table(["agrees", *labels], equal, tuple(columns)[:-1])
        blocks.append(Details(f"{len(equal)} rows that are equal", [table]))
    return Section("Checklist", blocks)


def _status(check: Check) -> Text:
    status = Strong(FATAL, "bad") if check.status == FATAL else check.status
    return (status, Detail(f"({check.reason})")) if check.reason else status


def _alignment_section(comparison: StudyComparison) -> Section:
    if not comparison.alignments:
        return Section("", [])
    variants = list(dict.fromkeys(line.variant for line in comparison.alignments))
    blocks: list[Block] = [Paragraph(ALIGNMENT), legend(variants)]
    for number, (names, lines) in enumerate(pairs(comparison)):
        caption = (
            f"{names}: relative difference of the training losses of the same run, running mean. "
            f"Dashed: {error(RULE)}. Dotted: the largest difference between two control arms of one study at one seed."
        )
        blocks += [
            Figure(f"curves{number}", figures.curves(lines, variants), caption),
            Details(f"{names}: {len(lines)} runs in numbers", [alignment_table(lines)]),
        ]
    if torn := sum(line.unreadable for line in comparison.alignments):
        blocks.append(Paragraph(f"{torn} unreadable lines of metrics.jsonl were skipped."))
    return Section("Do the curves coincide?", blocks)


def _order_section(comparison: StudyComparison) -> Section:
    blocks: list[Block] = [Paragraph(RANKING), Paragraph(order_note(comparison))]
    if any(ranking.places for ranking in comparison.rankings) and comparison.across:
        blocks += [Paragraph(ACROSS), across_table(comparison)]
    for ranking in comparison.rankings:
        blocks.append(Paragraph(ranking_note(ranking)))
        blocks += [ranking_table(ranking)] if ranking.places else []
    return Section("Order of the variants", blocks)


def _run_sections(comparison: StudyComparison) -> list[Section]:
    rows = [
        [study.label, run.name, run.status, run.why_not]
        for study in comparison.studies
        for run in study.report.runs
        if not run.used
    ]
    table = Table(["study", "run", "status", "reason"], rows, (0, 1, 2, 3))
    notes = [f"{study.label}: {note}" for study in comparison.studies for note in study.notes]
    return [
        Section("Runs that are not counted", [table if rows else Paragraph("None: every run counts.")]),
        Section("Notes", [BulletList(notes)] if notes else []),
    ]


def _check_lines(comparison: StudyComparison) -> list[str]:
    """The rows that differ. Rows that are merely not recorded share one line."""
    silent = [check for check in comparison.checks if check.status == NOT_RECORDED and not check.blocks]
    lines = [
        f"{check.status}: {check.subject}: {' | '.join(check.values)} ({check.reason})"
        for check in comparison.checks
        if check.status != EQUAL and check not in silent
    ]
    if silent:
        names = ", ".join(check.subject for check in silent)
        lines.append(f"{NOT_RECORDED}, so only the losses can show a difference: {names}")
    return lines


# ---- tables


def main_table(comparison: StudyComparison, brief: bool = False) -> Table:
    """Losses and changes where they may be compared, else changes to the baselines. brief: losses without interval."""
    labels = [study.label for study in comparison.studies]
    rows: list[list[Text]]
    if comparison.absolute:
        headings = [
            "variant",
            "seeds",
            "tokens",
            *labels,
            *(f"{label} against {labels[0]}" for label in labels[1:]),
        ]
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
        return Table(headings, rows)
    rows = [
        [
            row.variant,
            *(number_with_detail(change(interval, row.control)) for interval in row.against_baseline),
        ]
        for row in comparison.relative
    ]
    return Table(["variant", *(f"{label}: against its {BASELINE}" for label in labels)], rows)


def alignment_table(lines: list[Alignment], brief: bool = False) -> Table:
    """One row for each run of a pair of studies. brief: the columns that fit into a terminal."""
    headings = [
        "run", "iterations", "first step", "first tenth", "last tenth", f"within {error(RULE)}",
        f"parts: {error(RULE)}", "parts: A/A", "A/A first step", "A/A first tenth", "A/A last tenth",
    ]  # fmt: skip
    rows = [
        [
            line.run,
            f"{line.iterations:,}",
            error(line.errors.first),
            error(line.errors.early),
            error(line.errors.late),
            "yes" if line.within_rule else "no",
            f"{line.parts_from_rule:,}" if line.parts_from_rule else "never",
            _parts_from_envelope(line),
            error(line.envelope.first) if line.envelope else "-",
            error(line.envelope.early) if line.envelope else "-",
            error(line.envelope.late) if line.envelope else "-",
        ]
        for line in lines
    ]
    shown_columns = 8 if brief else len(headings)
    return Table(headings[:shown_columns], [row[:shown_columns] for row in rows])


def _parts_from_envelope(line: Alignment) -> str:
    if line.envelope is None:
        return "-"
    return f"{line.parts_from_envelope:,}" if line.parts_from_envelope else "never"


def ranking_table(ranking: Ranking) -> Table:
    rows: list[list[Text]] = [
        [
            place.variant + (" (one class)" if place.control else ""),
            number_with_detail(shown(place.loss)),
            str(place.place),
            _places(place.low, place.high),
        ]
        for place in ranking.places
    ]
    return Table(["variant", "perplexity", "observed place", "places that noise permits"], rows)


def across_table(comparison: StudyComparison) -> Table:
    """The places that noise permits in each study, among the variants that all of them have."""
    rows = [
        [
            row.variant + (" (one class)" if row.control else ""),
            *(_places(*places) if places else "-" for places in row.places),
            row.agreement,
        ]
        for row in comparison.across
    ]
    labels = [f"places in {study.label}" for study in comparison.studies]
    return Table(["variant", *labels, "the studies"], rows, (1 + len(labels),))


def _places(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def pairs(comparison: StudyComparison) -> list[tuple[str, list[Alignment]]]:
    """(both names, their alignments) of the first study with each other one that shares a curve with it."""
    found: dict[tuple[str, str], list[Alignment]] = {}
    for line in comparison.alignments:
        found.setdefault(line.studies, []).append(line)
    return [(" and ".join(names), lines) for names, lines in found.items()]
