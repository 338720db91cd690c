"""report.html: the study's report on one page, with figures. What it says comes from
`study.report.sentences`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pages.components import render_blocks
from pages.document import figures as figures_of
from pages.html import (
    Figure,
    Place,
    bullets,
    colour,
    legend,
    marked,
    note,
    page,
    plot,
    section,
    swatch,
    table,
    text,
    typeset,
)
from study.analysis.verdict import CANNOT_TELL, Verdict
from study.attention.data import read_study
from study.attention.page import report_section
from study.records.curves import probabilities, thinned, training_curves, validation_curves
from study.records.runs import BASELINE, losses
from study.report import figures, figures_final, figures_ranking, page_sections
from study.report.build import Report, Row, ended_runs
from study.report.markdown import about_results, seeds_cell
from study.report.sentences import difference, escape_markdown, hours_text, score, shown
from study.report.summary import at_equal_time, context, finding, first_screen, numbers, unjudged


def document(report: Report, study_dir: Path) -> str:
    """The whole page of a study's report."""
    drawn: dict[str, Figure] = {}

    def figure(name: str, made: Figure | None, caption: str) -> str:
        if made is None:
            return ""
        drawn[name] = made
        return plot(name, made, caption)

    names = [row.variant for row in report.rows]
    parts = [_header(report), _verdicts(report, names)]
    if report.rows:
        parts += [
            _results(report, names),
            legend(names),
            section(
                "Final differences", figure("differences", figures_final.differences(report), DIFFERENCES)
            ),
            _curves(report, study_dir, figure),
            section("What this study can see", page_sections.power(report)),
            page_sections.hellaswag(report, names, figure),
            section(
                "Speed and memory", figure("cost", figures_final.cost(report), COST), _cost(report, names)
            ),
            _alternation(report, figure),
            _attention(study_dir, names, drawn),
        ]
    parts += [
        page_sections.runs(report),
        page_sections.notes(report),
        page_sections.method(report),
    ]
    return page(f"{report.study}: attention ablation", "\n".join(part for part in parts if part), drawn)


DIFFERENCES = (
    "95 % intervals, t over seeds. Diamond: a real change against the mean of the control arms; this is the verdict's. "
    "Circle: paired by seed with the baseline. Grey: a variant without effect that varies like the control arms lies "
    "there in 95 % of studies with these seeds; the verdict does not use it."
)
COST = (
    "Means over the runs that ended their schedule, or over those that were cut where a variant has no other; memory "
    "is the highest peak that one of them allocated."
)


def _header(report: Report) -> str:
    counted = sum(run.used for run in report.runs)
    seeds = len({run.seed for run in report.runs if run.used})
    target = report.target or {}
    where = ", ".join(text(str(target[key])) for key in ("device", "dtype") if target.get(key))
    said = [
        f"GPT-2 attention on {where}" if where else "GPT-2 attention",
        f"{counted} of {len(report.runs)} runs counted",
        f"{seeds} seed{'' if seeds == 1 else 's'}",
    ]
    return f"<header><h1>{text(report.study)}</h1><p>{' · '.join(part for part in said if part)}</p></header>"


def _verdicts(report: Report, names: Sequence[str]) -> str:
    """One item a variant, then why, what to do next, and what limits the verdicts."""
    limits = bullets([marked(line) for line in context(report)])
    if not report.rows:
        return '<p class="warning">No finished run yet: there is nothing to compare.</p>' + limits
    verdicts = {verdict.variant: verdict for verdict in report.verdicts}
    items = {
        control: "".join(
            _verdict(row, verdicts.get(row.variant), report, names)
            for row in report.rows
            if row.control == control
        )
        for control in (False, True)
    }
    real, controls = (
        f'<ul class="verdicts">{items[kind]}</ul>' if items[kind] else "" for kind in (False, True)
    )
    bold = tuple(f"**{escape_markdown(row.variant)}**" for row in report.rows if not row.control)
    steps = [line for line in first_screen(report) if not any(name in line for name in bold)]
    said = "".join(f"<p>{marked(line)}</p>" for line in steps)
    return f'{real}{said}{controls}<div class="context">{limits}</div>'


def _verdict(row: Row, verdict: Verdict | None, report: Report, names: Sequence[str]) -> str:
    kind = "same"
    if row.variant == BASELINE:
        said, measured = "the baseline", f"perplexity {shown(row.final_loss, len(row.seeds))}"
    elif row.control:
        said = f"{BASELINE} with W_Q and W_K renamed: noise"
        measured = difference(row.against_baseline, len(row.seeds))
    elif verdict:
        when = at_equal_time(report, row.variant)
        said, measured = f"{when}: {finding(verdict)}" if when else finding(verdict), numbers(verdict)
        kind = "unsure" if verdict.word == CANNOT_TELL else verdict.word
    else:
        said, kind = unjudged(report), "unsure"
        measured = difference(row.against_baseline, len(row.seeds))
    return (
        f'<li class="{kind}" style="--variant: {colour(row.variant, names)}"><span><strong>{text(row.variant)}</strong>'
        f'<span class="said">{text(said)}</span></span><span class="numbers">{typeset(measured)}</span></li>'
    )


def _results(report: Report, names: Sequence[str]) -> str:
    rows = [
        [
            swatch(row.variant, names),
            seeds_cell(row),
            _two_lines(shown(row.final_loss, len(row.seeds))),
            _two_lines(shown(row.best_loss, len(row.seeds))),
            _two_lines(difference(row.against_baseline, len(row.seeds))),
            score(row.hellaswag, norm=True),
        ]
        for row in report.rows
    ]
    headings = [
        "variant",
        "number of seeds",
        "final perplexity",
        "best perplexity",
        f"final against {BASELINE}",
        "HellaSwag (norm)",
    ]
    return section("Results", table(headings, rows), note(about_results()))


def _two_lines(cell: str) -> str:
    """A number, and its interval and what it means in smaller type under it."""
    place = min((cell.find(sign) for sign in (" [", " (") if sign in cell), default=-1)
    return (
        typeset(cell) if place < 0 else f"{typeset(cell[:place])}<small>{typeset(cell[place + 1 :])}</small>"
    )


def _curves(report: Report, study_dir: Path, figure: Place) -> str:
    used = [run for run in report.runs if run.used]
    each = (
        report.effective_batch * report.block_size if report.effective_batch and report.block_size else None
    )
    several = len({run.seed for run in used}) > 1
    band = "Lines: mean over seeds. Shaded: from the lowest seed to the highest. " if several else ""
    together = (
        "Seeds move all variants together; the differences below do not contain that." if several else ""
    )
    places = thinned(sorted(set.intersection(*(set(losses(run.record)) for run in used))), 100)
    ranks = figures_ranking.over_training(report, places)
    drawn = validation_curves(ended_runs(report))
    return section(
        "Over training",
        "<h3>Validation</h3>",
        figure("validation", figures.loss_curves(drawn, each, "validation", True),
               f"{band}{together}{figures.coinciding(drawn)}"),
        "<h3>Differences and ranking</h3>",
        figure("ranking", ranks, "Against the mean of the control arms, where every run was evaluated. Grey: a "
               "variant without effect that varies like the control arms lies there in 95 % of studies, each point. "
               "Ranks: the control arms share one, and with them the variants that a paired t test over seeds does not "
               "tell from them.")
        or note("No ranking: the variants share no seed and point of evaluation."),
        note(order) if (order := figures_ranking.in_words(report, ranks)) else "",
        "<h3>Training loss</h3>" if (training := training_curves(study_dir, used)) else "",
        figure("training", figures.loss_curves(training, each, "training", False),
               f"{band}Means over spans of training steps, from metrics.jsonl."),
    )  # fmt: skip


def _cost(report: Report, names: Sequence[str]) -> str:
    rows = [
        [
            swatch(row.variant, names),
            f"{row.iterations:,.0f}",
            f"{row.tokens:,.0f}",
            hours_text(row.train_seconds / 3600)
            if row.train_seconds >= 90
            else f"{row.train_seconds:,.1f} s",
            f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
            f"{100 * row.mfu:.1f} %" if row.mfu is not None else "-",
            f"{row.peak_memory_bytes / 2**30:.2f}" if row.peak_memory_bytes is not None else "-",
            f"{row.cut} of {len(row.seeds)}" if row.cut else "-",
        ]
        for row in report.rows
    ]
    headings = ["variant", "updates", "tokens", "training", "tokens/s", "MFU", "peak GiB", "cut short"]
    return table(headings, rows)


def _alternation(report: Report, figure: Place) -> str:
    made = [
        figure(f"alternation{number}", figures.alternation(found),
               f"{text(found.variant)}: mean over {found.seeds} seed{'' if found.seeds == 1 else 's'}. "
               "From blue, the first layer, to orange, the last.")
        for number, found in enumerate(probabilities([run for run in report.runs if run.used]))
    ]  # fmt: skip
    return section("What was learned", *made)


def _attention(study_dir: Path, names: Sequence[str], drawn: dict[str, Figure]) -> str:
    found = read_study(study_dir)
    if not found:
        return ""
    section_ = report_section([look for look in found[0] if look.variant in names], found[1], names)
    drawn |= figures_of([section_])
    return render_blocks([section_])
