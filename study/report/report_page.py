"""The report of a study as a document, for report.html, report.md and the terminal. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gpt2.clocks import UNEVEN_TIMES
from ra.arms import parse_arm
from referee.pages.document import (
    HTML,
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Findings,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
    render_markdown,
)
from referee.pages.document import render_terminal as render_document
from referee.pages.html_page import render_html
from referee.pages.latex import render_latex
from referee.pages.markup import Inline, Link, Strong, Text, pieces
from referee.verdict.statistics import percent, perplexity
from runtime.errors import UserError
from runtime.files import write_bytes, write_text
from runtime.metrics_log import last_lines
from study.arm_colors import legend
from study.evaluation.lm_eval_page import downstream_json, downstream_section
from study.hellaswag_scores import TASKS
from study.report import report_figures
from study.report import report_sections as sections
from study.report.method import METHOD, facts_section, score, seeds_text, shown, uncounted
from study.report.report_data import ArmRow, Report, as_json, bits, build_report
from study.report.report_sections import (
    ABOUT_LOOKS,
    ABOUT_RESULTS,
    choice_blocks,
    held_out_section,
    results_table,
)
from study.report.report_summary import (
    common_findings,
    context,
    findings,
    next_step,
    no_verdict,
    sensitivity_sentences,
)
from study.runs import BASELINE, Run, module, task_of, to_baseline
from study.terminal import last_result

LONG = 40  # runs, above which their list is folded
MANY = 8  # notes, above which they are folded
NOTHING = "No finished run yet: there is nothing to compare."


def report_document(report: Report, study_dir: Path) -> Document:
    """report.html and report.md."""
    blocks = [
        Paragraph(report.experiment.text),
        *_verdict(report),
        BulletList(context(report), small=True),
    ]
    if report.rows:
        differences = Figure("differences", report_figures.differences(report), sections.ABOUT_DIFFERENCES)
        blocks += [
            sections.results_section(report),
            legend(report.variants),
            Section("Final differences", [differences]),
            _learning_rates(report),
            Only((HTML,), [sections.training_section(report)]),
            Section("Detectable differences", [BulletList(sensitivity_sentences(report))]),
            *(sections.endings_section(report, task) for task in TASKS),
            held_out_section(report.eval_sets, report.variants),
            downstream_section(study_dir, report.used, report.variants),
            sections.cost_section(report),
            sections.alternation_section(report),
        ]
    blocks += [
        _unfinished(report, study_dir),
        _runs(report),
        _notes(report),
        Section("Method", [BulletList(METHOD)]),
        Only((HTML,), [facts_section(report)]),
    ]
    return Document(report.study, blocks, subtitle=_subtitle(report))


def terminal_document(report: Report) -> Document:
    """The verdict and the next step, the table, then the limits of the verdict."""
    notes = [sections.near_chance_note(report, task) for task in TASKS]
    head = [Paragraph(report.experiment.text), *_verdict(report)]
    uneven = [note for note in report.notes if note.startswith(UNEVEN_TIMES)]
    return Document("", [*head, _terminal_table(report), *notes, BulletList([*context(report), *uneven])])


def _subtitle(report: Report) -> str:
    counted = f"{len(report.used)} of {len(report.runs)} runs counted"
    return f"GPT-2 attention · {counted} · {seeds_text(len({run.seed for run in report.used}))}"


def _verdict(report: Report) -> list[Block]:
    """The verdicts, and the next step."""
    damaged = [Paragraph((Strong("Damaged:"), f" {sentence}")) for sentence in report.damaged]
    nothing = Paragraph("" if report.rows else Strong(NOTHING))
    notes = [Paragraph(no_verdict(report)), Paragraph(next_step(report))]
    return [*damaged, nothing, Findings(findings(report)), *notes]


def _learning_rates(report: Report) -> Section:
    """The choice of the learning rates, and the verdicts at one rate."""
    if report.tuned is None or report.design is None:
        return Section("", [])
    rate = parse_arm(report.design.controls[0]).rate if report.design.controls else ""
    heading = f"All arms at one rate: {rate}, that of the control arms"
    verdicts = Section(heading, [Findings(common_findings(report))], level=3)
    return Section("Learning rates", [*(choice_blocks(report.choice) if report.choice else []), verdicts])


def _unfinished(report: Report, study_dir: Path) -> Section:
    """The last validation of the runs that train or were interrupted; no verdict uses it."""
    columns: dict[str, Callable[[Run], Text]] = {
        "run": lambda run: run.name,
        "status": lambda run: run.status,
        "last validation": lambda run: last_result(
            run.record, last_lines(run.file(study_dir, "")).get("validation")
        ),
        f"to {BASELINE}": lambda run: to_baseline(run.file(study_dir, ""), run.record),
    }
    runs = [run for run in report.runs if run.status in ("running", "interrupted")]
    about = (
        f"No verdict uses these. To {BASELINE}: at its seed, at the last tokens at which both were validated."
    )
    return Section("Unfinished runs", [Note(about), Table.of(runs, columns)] if runs else [])


def _runs(report: Report) -> Section:
    """Every run with a link to its record."""
    columns: dict[str, Callable[[Run], Text]] = {
        "run": lambda run: (
            run.name if run.status == "missing" else Link(run.name, f"runs/{run.name}/run.json")
        ),
        "status": lambda run: "pending" if run.status == "missing" else run.status,
        "counted": lambda run: "yes" if run.used else f"no: {run.why_not}",
        "perplexity": _perplexity,
        "tokens": lambda run: f"{run.record.progress.tokens:,.0f}" if run.record.progress else "-",
        "training s": lambda run: f"{run.record.progress.train_seconds:,.1f}" if run.record.progress else "-",
    }
    table = Table.of(report.runs, columns, (2,), sortable=True)
    return Section("Runs", [_folded(table, len(report.runs), LONG, "runs")])


def _perplexity(run: Run) -> str:
    return perplexity(run.value) if run.used else "-"


def _notes(report: Report) -> Section:
    """The notes of the plan and of the runs."""
    return Section("Notes", [_folded(BulletList(report.notes), len(report.notes), MANY, "notes")])


def _folded(block: Block, count: int, most: int, what: str) -> Block:
    return Details(f"{count:,} {what}", [block]) if count > most else block


def _terminal_table(report: Report) -> Table:
    """The table that fits into a terminal."""
    columns: dict[str, Callable[[ArmRow], Text]] = {
        "variant": lambda row: row.variant,
        "seeds": sections.seeds_cell,
        "perplexity [95 %]": lambda row: shown(row.final_loss),
        "bits/byte": lambda row: f"{found.mean:.3f}" if (found := bits(report, row.final_loss)) else "-",
        f"to {report.reference}": lambda row: (
            percent(row.against_controls.mean) if row.against_controls else "-"
        ),
        **{task.name: partial(score, task=task, measure="acc") for task in TASKS},
        "tokens": lambda row: f"{row.tokens / 1e6:,.2f}M",
        "tok/s": sections.tokens_per_second,
    }
    return Table.of(report.rows, columns)


# Write report.json, report.md, report.html and table.tex, and render the terminal's summary.


LATEX_FILE = "table.tex"
REFRESH_SECONDS = 60  # of an open page, while runs of the study are unfinished


def write_report(study_dir: Path) -> Any:
    """Rebuild report.html, report.md and report.json, each replaced at once; return the Report, or GrpoReport."""
    if task_of(study_dir) == "grpo":
        page = module("study.grpo_page")
        report = page.build_report(study_dir)
        document, content = page.report_document(report), page.as_json(report)
    else:
        report = build_report(study_dir)
        document = report_document(report, study_dir)
        content = as_json(report) | downstream_json(study_dir, report.used)
    write_text(study_dir / "report.html", render_html(document, REFRESH_SECONDS if report.pending else 0))
    write_text(study_dir / "report.md", render_markdown(document))
    encoded = msgspec.json.encode(content)  # json's indent takes ten times as long
    write_bytes(study_dir / "report.json", msgspec.json.format(encoded, indent=1))
    return report


def render_terminal(report: Any) -> str:
    """The report in lines of at most 100 columns."""
    if not isinstance(report, Report):
        return render_document(module("study.grpo_page").report_document(report))
    return render_document(terminal_document(report))


def write_latex(report: Any, study_dir: Path) -> Path:
    """Write table.tex and return its path. UserError if no run counts."""
    if not isinstance(report, Report):
        raise UserError(f"{study_dir} trains by GRPO, and its report has no LaTeX form; fix: make report")
    if not report.rows:
        raise UserError(f"{study_dir} has no finished run, so no table; fix: run `make`")
    label = re.sub(r"[^a-z0-9]+", "-", report.study.lower()).strip("-") or "study"
    path = study_dir / LATEX_FILE
    write_text(path, f"{render_latex(results_table(report), latex_caption(report), f'tab:{label}')}\n")
    return path


def latex_caption(report: Report) -> Text:
    """The caption: the content of the table, the sentence of each verdict, and the runs that are not counted."""
    seeds = seeds_text(len({run.seed for run in report.used}))
    parts: list[Inline] = [f"{report.study}, {seeds}: perplexity per {report.unit} {ABOUT_RESULTS}"]
    sentences: list[Text] = [report.experiment.text, *(finding.sentence for finding in findings(report))]
    sentences += [ABOUT_LOOKS] if report.verdicts else []
    why = pieces(no_verdict(report))
    sentences += [why[0] if why else "", uncounted(report), *report.damaged]
    for sentence in sentences:
        parts += [" ", *pieces(sentence)] if pieces(sentence) else []
    return tuple(parts)
