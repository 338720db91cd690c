"""The report of a study as a document, for report.html, report.md and the terminal. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from gpt2.artifacts.run_record import RunRecord
from pages.components import legend
from pages.document import (
    HTML,
    Block,
    BulletList,
    Details,
    Document,
    Findings,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
    Warning,
)
from pages.markup import Link, Text
from study.records.runs import BASELINE, Run
from study.report import figures_final
from study.report.build import Report
from study.report.detectable import sensitivity_sentences
from study.report.facts import facts_section
from study.report.method import method
from study.report.sections import (
    ABOUT_DIFFERENCES,
    alternation_section,
    attention_sections,
    cost_section,
    figure,
    gibibytes,
    hellaswag_section,
    near_chance_notes,
    results_section,
    seeds_cell,
    training_section,
)
from study.report.sentences import (
    percent,
    perplexity,
    score,
    shown,
    status_text,
)
from study.report.summary import (
    context,
    control_findings,
    findings,
    next_step,
    no_verdict,
    run_names,
)

LONG = 40  # runs, above which their list is folded
MANY = 8  # notes, above which they are folded
NOTHING = "No finished run yet: there is nothing to compare."


def report_document(report: Report, study_dir: Path) -> Document:
    """report.html and report.md."""
    names = [row.variant for row in report.rows]
    blocks = _first_screen(report)
    if report.rows:
        blocks += [
            results_section(report, names),
            legend(names),
            Section(
                "Final differences",
                figure("differences", figures_final.differences(report), ABOUT_DIFFERENCES),
            ),
            Only((HTML,), [training_section(report, study_dir)]),
            Section("Detectable differences", [BulletList(sensitivity_sentences(report))]),
            hellaswag_section(report, names),
            cost_section(report, names),
            alternation_section(report),
            Only((HTML,), attention_sections(study_dir, names)),
        ]
    blocks += [
        _runs(report),
        _notes(report),
        Section("Method", [BulletList(method(report))]),
        Only((HTML,), [facts_section(report)]),
    ]
    title = f"{report.study}: attention ablation"
    return Document(report.study, blocks, subtitle=_subtitle(report), page_title=title)


def terminal_document(report: Report) -> Document:
    """The verdict and the next step, the table, then the limits of the verdict."""
    table: list[Block] = [_terminal_table(report), *near_chance_notes(report)] if report.rows else []
    return Document("", [*_verdict(report), *table, BulletList(context(report))])


def _subtitle(report: Report) -> str:
    counted = sum(run.used for run in report.runs)
    seeds = len({run.seed for run in report.runs if run.used})
    target = report.target or {}
    where = ", ".join(str(target[key]) for key in ("device", "dtype") if target.get(key))
    parts = [
        f"GPT-2 attention on {where}" if where else "GPT-2 attention",
        f"{counted} of {len(report.runs)} runs counted",
        f"{seeds} seed{'' if seeds == 1 else 's'}",
    ]
    return " · ".join(parts)


# ---- the first screen


def _verdict(report: Report) -> list[Block]:
    """The verdicts, and the next step."""
    blocks: list[Block] = [] if report.rows else [Warning(NOTHING)]
    found = findings(report)
    blocks += [Findings(found)] if found else []
    return [*blocks, *(Paragraph(text) for text in (no_verdict(report), next_step(report)) if text)]


def _first_screen(report: Report) -> list[Block]:
    """The verdicts, the next step, the control arms, and the limits of the verdicts."""
    return [
        *_verdict(report),
        Only((HTML,), [Findings(control_findings(report))]),
        BulletList(context(report), small=True),
    ]


def _runs(report: Report) -> Section:
    """Every run with a link to its record, folded where they are many."""
    headings = ["run", "status", "counted", "perplexity", "tokens", "training s"]
    table: Block = Table(headings, [_run(run) for run in report.runs], (2,))
    if len(report.runs) > LONG:
        table = Details(f"{len(report.runs):,} runs", [table])
    example = run_names(report)
    return Section("Runs", [*([Note(example)] if example else []), table])


def _run(run: Run) -> list[Text]:
    record: RunRecord = run.record  # not complete where the run is not used
    loss = record.validation.loss if record.validation else None
    progress = record.progress
    return [
        run.name if run.status == "missing" else Link(run.name, f"runs/{run.name}/run.json"),
        status_text(run),
        "yes" if run.used else f"no: {run.why_not}",
        perplexity(loss) if loss is not None else "-",
        f"{progress.tokens:,.0f}" if progress else "-",
        f"{progress.train_seconds:,.1f}" if progress else "-",
    ]


def _notes(report: Report) -> Section:
    """The notes of the plan and of the runs, folded where they are many."""
    notes: list[Block] = [BulletList(report.notes)] if report.notes else []
    if len(report.notes) > MANY:
        notes = [Details(f"{len(report.notes):,} notes", notes)]
    return Section("Notes", notes)


# ---- terminal


def _terminal_table(report: Report) -> Table:
    """The table that fits into a terminal."""
    headings = [
        "variant",
        "seeds",
        "perplexity [95 %]",
        f"to {BASELINE}",
        "HellaSwag",
        "tokens",
        "tok/s",
        "GiB",
    ]
    rows = [
        [
            row.variant[:14],
            seeds_cell(row),
            shown(row.final_loss),
            percent(row.against_baseline.mean) if row.against_baseline else "-",
            score(row.hellaswag),
            f"{row.tokens / 1e6:,.2f}M",
            f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
            gibibytes(row),
        ]
        for row in report.rows
    ]
    return Table(headings, rows)
