"""A comparison as Markdown and as text for the terminal; study.compare.sentences has its sentences."""

from __future__ import annotations

from pathlib import Path

from study.compare.alignment import RULE, Alignment
from study.compare.build import Comparison
from study.compare.checklist import EQUAL, NOT_RECORDED, Check
from study.compare.ranking import Ranking
from study.compare.sentences import above_table, counts, error, order_note, ranking_note, sentences
from study.records.runs import BASELINE
from study.report.markdown import WIDTH, columns, plain, table, wrap
from study.report.sentences import change, escape_markdown, perplexity, shown

Table = tuple[list[str], list[list[str]]]  # headings, rows


def checklist_table(comparison: Comparison) -> Table:
    rows = [[check.subject, check.status, *check.values, check.reason] for check in comparison.checks]
    return ["must agree", "", *_labels(comparison), "what it means"], [
        [escape_markdown(cell) for cell in row] for row in rows
    ]


def main_table(comparison: Comparison, brief: bool = False) -> Table:
    """The absolute comparison where it is allowed, else against the baselines; brief: without studies' intervals."""
    labels = _labels(comparison)
    if comparison.absolute:
        changes = [f"{label} against {labels[0]}" for label in labels[1:]]
        return ["variant", "seeds", "tokens", *labels, *changes], [
            [
                escape_markdown(row.variant),
                ", ".join(map(str, row.seeds)),
                f"{row.tokens:,}",
                *(perplexity(loss.mean) if brief else shown(loss) for loss in row.losses),
                *(change(difference, False) for difference in row.differences),
            ]
            for row in comparison.absolute
        ]
    headings = ["variant", *(f"{label}: against its {BASELINE}" for label in labels)]
    return headings, [
        [
            escape_markdown(row.variant),
            *(change(interval, row.control) for interval in row.against_baseline),
        ]
        for row in comparison.relative
    ]


def alignment_table(lines: list[Alignment]) -> Table:
    """A row for each run of a pair of studies."""
    headings = [
        "run", "iterations", "first step", "first tenth", "last tenth", f"within {error(RULE)}",
        "A/A first step", "A/A first tenth", "A/A last tenth", f"parts: {error(RULE)}", "parts: A/A",
    ]  # fmt: skip
    return headings, [
        [
            escape_markdown(line.run),
            f"{line.iterations:,}",
            error(line.errors.first),
            error(line.errors.early),
            error(line.errors.late),
            "yes" if line.within_rule else "no",
            error(line.envelope.first) if line.envelope else "-",
            error(line.envelope.early) if line.envelope else "-",
            error(line.envelope.late) if line.envelope else "-",
            f"{line.parts_from_rule:,}" if line.parts_from_rule else "never",
            _parts_from_envelope(line),
        ]
        for line in lines
    ]


def _parts_from_envelope(line: Alignment) -> str:
    if line.envelope is None:
        return "-"
    return f"{line.parts_from_envelope:,}" if line.parts_from_envelope else "never"


def ranking_table(ranking: Ranking) -> Table:
    return ["variant", "perplexity", "place seen", "places that noise permits"], [
        [
            escape_markdown(one.variant) + (" (one class)" if one.control else ""),
            shown(one.loss),
            str(one.place),
            _places(one.low, one.high),
        ]
        for one in ranking.places
    ]


def across_table(comparison: Comparison) -> Table:
    """The places that noise permits in each study, among the variants that all of them have."""
    return ["variant", *(f"places in {label}" for label in _labels(comparison)), "the studies"], [
        [
            escape_markdown(row.variant) + (" (one class)" if row.control else ""),
            *(_places(*seen) if seen else "-" for seen in row.places),
            row.agreement,
        ]
        for row in comparison.across
    ]


def _places(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def pairs(comparison: Comparison) -> list[tuple[str, list[Alignment]]]:
    """(the two names, their alignments) of the first study with each other that shares a curve with it."""
    found: dict[tuple[str, str], list[Alignment]] = {}
    for line in comparison.alignments:
        found.setdefault(line.studies, []).append(line)
    return [(" and ".join(map(escape_markdown, names)), lines) for names, lines in found.items()]


def _labels(comparison: Comparison) -> list[str]:
    return [escape_markdown(study.label) for study in comparison.studies]


ALIGNMENT = (
    "Relative difference of the training losses of the same run in two studies: at the first shared iteration, and the "
    "means over the first and the last tenth. A/A is the largest such difference between two control arms of one "
    "seed in either study; arms start as other functions of the same weights, so a first step beyond it is one of "
    "other weights, batches or precision. A curve parts at the first iteration that is beyond, as is the mean of those "
    "that follow."
)
RANKING = (
    "A place is known only as far as noise permits: control arms share their mean and one range "
    "of places; a real change is above or below them by its study's own verdict, and two real changes are told apart "
    "by a paired t test over the seeds, adjusted by Holm's method over the pairs."
)
ACROSS = "Places that noise permits, among the variants that all studies have; the studies agree on a variant where "
ACROSS += "they tell it from the same others, towards the same side."


def markdown(comparison: Comparison) -> str:
    """compare.md."""
    lines = [f"# {' | '.join(_labels(comparison))}", "", *("- " + line for line in sentences(comparison))]
    if comparison.checks:
        title = "Equal tokens" if comparison.absolute else f"Against each study's own {BASELINE}"
        lines += ["", f"## {title}", "", above_table(comparison), "", *table(*main_table(comparison))]
        lines += ["", "## Checklist", "", f"{counts(comparison)}.", "", *table(*checklist_table(comparison))]
        lines += _alignment_section(comparison) + _ranking_section(comparison)
    return "\n".join([*lines, *_runs_section(comparison), ""])


def _alignment_section(comparison: Comparison) -> list[str]:
    lines = ["", "## Do the curves coincide?", "", ALIGNMENT] if comparison.alignments else []
    for names, rows in pairs(comparison):
        lines += ["", names + ":", "", *table(*alignment_table(rows))]
    torn = sum(line.unreadable for line in comparison.alignments)
    return [*lines, "", f"{torn} unreadable lines of metrics.jsonl were passed over."] if torn else lines


def _ranking_section(comparison: Comparison) -> list[str]:
    lines = ["", "## Order of the variants", "", RANKING]
    lines += ["", order_note(comparison)]
    if any(ranking.places for ranking in comparison.rankings) and comparison.across:
        lines += ["", ACROSS, "", *table(*across_table(comparison))]
    for ranking in comparison.rankings:
        lines += ["", ranking_note(ranking)]
        lines += ["", *table(*ranking_table(ranking))] if ranking.places else []
    return lines


def _runs_section(comparison: Comparison) -> list[str]:
    lines = ["", "## Runs that are not counted", ""]
    rows = [
        [escape_markdown(study.label), escape_markdown(run.name), run.status, escape_markdown(run.why_not)]
        for study in comparison.studies
        for run in study.report.runs
        if not run.used
    ]
    lines += table(["study", "run", "status", "why"], rows) if rows else ["None: every run counts."]
    notes = [
        f"- {escape_markdown(study.label)}: {escape_markdown(note)}"
        for study in comparison.studies
        for note in study.notes
    ]
    return [*lines, "", "## Notes", "", *notes] if notes else lines


def terminal(comparison: Comparison, written: list[Path] | None = None) -> str:
    """At most 100 columns: the sentences, what differs, the table, the curves, the order."""
    lines = [wrap("- " + line) for line in sentences(comparison)]
    if comparison.checks:
        lines += ["", f"checklist: {counts(comparison)}", *_terminal_checks(comparison)]
        lines += ["", wrap(above_table(comparison)), "", *_terminal_table(main_table(comparison, brief=True))]
        for names, rows in pairs(comparison):
            lines += ["", f"training losses at equal iterations, {plain(names)}"]
            lines += _terminal_table(_narrow(alignment_table(rows)))
        for ranking in comparison.rankings:
            lines += ["", wrap(ranking_note(ranking))]
            lines += _terminal_table(ranking_table(ranking)) if ranking.places else []
        lines += ["", wrap(order_note(comparison))]
    if written:
        lines += ["", *(f"wrote {path}" for path in written)]
    return "\n".join(lines)


def _terminal_checks(comparison: Comparison) -> list[str]:
    """The rows that are not equal; those that are merely not on record on one line."""

    def line(check: Check) -> str:
        values = " | ".join(escape_markdown(value) for value in check.values)
        return wrap(
            f"  {check.status}: {escape_markdown(check.subject)}: {values} ({escape_markdown(check.reason)})"
        )

    silent = [check for check in comparison.checks if check.status == NOT_RECORDED and not check.blocks]
    told = [line(check) for check in comparison.checks if check.status != EQUAL and check not in silent]
    if silent:
        names = ", ".join(escape_markdown(check.subject) for check in silent)
        told.append(wrap(f"  {NOT_RECORDED}, so that only the losses could tell: {names}"))
    return told


def _terminal_table(content: Table) -> list[str]:
    headings, rows = content
    cells = [[plain(cell) for cell in row] for row in [headings, *rows]]
    if sum(max(len(row[n]) for row in cells) for n in range(len(headings))) + len(headings) <= WIDTH:
        return columns(cells, WIDTH)
    lines = []  # too wide for columns: a block for each row
    for row in cells[1:]:
        lines.append(row[0][:WIDTH])
        lines += [wrap(f"  {head}: {cell}") for head, cell in zip(cells[0][1:], row[1:], strict=True)]
    return lines


def _narrow(content: Table) -> Table:
    """The columns that a terminal has room for."""
    kept = (0, 1, 2, 3, 4, 5, 9, 10)
    headings, rows = content
    return [headings[n] for n in kept], [[row[n] for n in kept] for row in rows]
