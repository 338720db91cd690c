"""A report in words: Markdown for the reader, a plain table for the terminal."""

from __future__ import annotations

import html
import re
import textwrap

from ra.names import ONE_CLASS as ONE_CLASS
from study.analysis.timing import time_limit
from study.records.runs import BASELINE
from study.report.build import Report, Row
from study.report.method import METHOD
from study.report.sentences import (
    CANNOT_TELL,
    alike,
    by_item,
    by_window,
    change,
    inert,
    not_of_seeds,
    percent,
    score,
    sentence,
    shown,
    verdicts,
    visible,
)

WIDTH = 100  # columns of the terminal
SAME = 0.98  # of the longest time: what is called equal time


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _about(report: Report) -> str:
    """What the final numbers are, in a sentence that is true of this budget."""
    seconds = time_limit(report.budget)
    spent = [row.train_seconds for row in report.rows]
    if seconds and not report.early and min(spent) >= SAME * max(spent):
        what = f"At equal time: the last step of each variant, under a budget of {seconds:,} s of training"
    else:
        what = "At the end of the budget: the last step of each variant (tokens and seconds are under Cost)"
    return (
        f"{what}. Mean over seeds [95 % interval]; the difference to {BASELINE} is paired by seed, in percent of "
        "perplexity, and lower is better."
    )


def _results(report: Report) -> list[str]:
    rows = [
        [
            inert(row.variant),
            ", ".join(str(seed) for seed in row.seeds),
            shown(row.final_loss, len(row.seeds)),
            shown(row.best_loss, len(row.seeds)),
            change(row.against_baseline, row.equivalent, len(row.seeds), row.allowance),
        ]
        for row in report.rows
    ]
    headings = ["variant", "seeds", "final perplexity", "best perplexity", f"final against {BASELINE}"]
    lines = ["## Perplexity", "", _about(report), "", *table(headings, rows)]
    if len({(*row.seeds, _seeds(row)) for row in report.rows}) > 1:
        lines += [
            "",
            "The means are over different seeds and cannot be compared with each other; the differences can.",
        ]
    return [*lines, "", *_equal_tokens(report)]


def _equal_tokens(report: Report) -> list[str]:
    if report.equal_tokens is None:
        return ["At equal tokens: the runs share no point of evaluation."]
    if report.same_point:
        return [
            f"At equal tokens: the same numbers, since every run ended at {report.equal_tokens:,} tokens."
        ]
    rows = [
        [
            inert(row.variant),
            shown(row.equal_tokens_loss),
            change(row.against_baseline_equal_tokens, row.equivalent, allowance=row.allowance_equal_tokens),
        ]
        for row in report.rows
    ]
    return [
        f"At equal tokens ({report.equal_tokens:,}, the last point at which every counted run was evaluated; the "
        "learning rate had not finished its decay there in runs that went on).",
        "",
        *table(["variant", "perplexity", f"against {BASELINE}"], rows),
    ]


def _hellaswag(report: Report) -> list[str]:
    lines = ["## HellaSwag", ""]
    if all(row.hellaswag.acc is None for row in report.rows):
        reasons = dict.fromkeys(row.hellaswag.absent for row in report.rows)
        return [*lines, *(f"Not run: {sentence(reason)}" for reason in reasons)]
    lines += table(
        ["variant", "acc", "acc_norm", "items", "runs"],
        [
            [
                inert(row.variant),
                score(row.hellaswag),
                score(row.hellaswag, norm=True),
                f"{row.hellaswag.items:,}" if row.hellaswag.items else "-",
                f"{row.hellaswag.runs} of {len(row.seeds)}",
            ]
            for row in report.rows
        ],
    )
    lines += ["", "± one standard error of the items; chance is 25 %."]
    lines += _near_chance(report)
    lines += _items(report)
    lines += [f"{inert(row.variant)} not run: {sentence(row.hellaswag.absent)}" for row in report.rows
              if row.hellaswag.acc is None]  # fmt: skip
    return lines


def _items(report: Report) -> list[str]:
    tests = report.evidence.items
    if not tests:
        return []
    names = dict.fromkeys(test.variant for test in tests)
    said = {(test.variant, test.measure): by_item(test) for test in tests}
    rows = [[inert(name), *(said.get((name, key), "-") for key in ("acc", "acc_norm"))] for name in names]
    return [
        "",
        f"Item by item against {BASELINE} (items won / lost; McNemar's exact test, adjusted by Holm). It compares "
        "these trained runs on these items and contains no seed noise.",
        "",
        *table(["variant", "acc", "acc_norm"], rows),
    ]


def _power(report: Report) -> list[str]:
    """What the study can see, and its checks."""
    evidence = report.evidence
    seen = [*visible(evidence.sensitivity), *not_of_seeds(report.judged)]
    lines = ["## What this study can see", "", *(f"- {line}" for line in [*seen, alike(evidence.spread)])]
    if evidence.windows:
        windows = evidence.windows[0].windows
        listed = "; ".join(f"{inert(row.variant)} {by_window(row)}" for row in evidence.windows)
        lines.append(
            f"- Same windows, paired: against {BASELINE} over {windows:,} validation windows, {listed}. These "
            "intervals are those of the text; they contain **no seed noise** and rank nothing."
        )
    return lines


def _near_chance(report: Report) -> list[str]:
    near = [inert(row.variant) for row in report.rows if row.hellaswag.near_chance]
    return (
        [f"† Within two standard errors of chance, so no sign of skill: {', '.join(near)}."] if near else []
    )


def gibibytes(row: Row) -> str:
    """The highest peak of the variant's runs."""
    return "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.2f}"


def _cost(report: Report) -> list[str]:
    def line(row: Row) -> list[str]:
        return [
            inert(row.variant),
            f"{row.iterations:,.0f}",
            f"{row.tokens:,.0f}",
            f"{row.train_seconds:,.1f}",
            f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
            f"{100 * row.mfu:.1f} %" if row.mfu is not None else "-",
            gibibytes(row),
            str(report.effective_batch),
        ]

    headings = [
        "variant",
        "iterations",
        "tokens",
        "training s",
        "tokens/s",
        "MFU",
        "peak GiB",
        "effective batch",
    ]
    lines = ["## Cost", "", *table(headings, [line(row) for row in report.rows])]
    cut = [f"{inert(row.variant)} ({row.cut} of {len(row.seeds)})" for row in report.rows if row.cut]
    if cut:
        lines += [
            "",
            f"Schedule cut short by the training clock (the learning rate did not finish its decay): {', '.join(cut)}.",
        ]
    return lines


def _learned(report: Report) -> list[str]:
    if not report.learned:
        return []
    lines = [
        "## What was learned",
        "",
        "Probability of the reciprocal path, layer by layer, mean over seeds, at the first and the last evaluation.",
        "",
    ]
    for name, moments in report.learned.items():
        layers = [str(layer) for layer in range(len(moments["last"]))]
        rows = [[moment, *(f"{p:.3f}" for p in moments[moment])] for moment in ("first", "last")]
        lines += [*table([inert(name), *layers], rows), ""]
    return lines[:-1]


def _runs(report: Report) -> list[str]:
    rows = [
        [inert(run.name), run.status, "yes" if run.used else f"no: {inert(run.why_not)}"]
        for run in report.runs
    ]
    return ["## Runs", "", *table(["run", "status", "counted"], rows)]


def markdown(report: Report) -> str:
    """report.md."""
    target = report.target
    where = f" on {inert(target['device'])}, {inert(target['dtype'])}" if target else ""
    lines = [f"# {inert(report.study)}{where}", "", *("- " + line for line in verdicts(report))]
    if not report.rows:
        lines += ["", "No finished run yet: there is nothing to compare."]
    else:
        for section in (_results, _power, _hellaswag, _cost, _learned):
            lines += ["", *section(report)] if section(report) else []
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {inert(note)}" for note in report.notes)]
    return "\n".join([*lines, "", *_runs(report), "", METHOD, ""])


def plain(text: str) -> str:
    """A Markdown sentence for the terminal."""
    return html.unescape(re.sub(r"\\(.)", r"\1", text.replace("**", "")))


def wrap(line: str) -> str:
    """A Markdown sentence in lines of the terminal; a number keeps its percent sign."""
    kept = plain(line).replace(" %", "\u00a0%")
    return textwrap.fill(kept, WIDTH, subsequent_indent="  ").replace("\u00a0", " ")


def columns(rows: list[list[str]], width: int) -> list[str]:
    """Cells in columns, the first to the left; closer together where they would not fit."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= width else " "
    lines = []
    for row in rows:
        cells = [f"{cell:<{size}}" if not place else f"{cell:>{size}}"
                 for place, (cell, size) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(gap.join(cells)[:width].rstrip())
    return lines


def terminal(report: Report) -> str:
    """At most 100 columns: the table, then the verdicts."""
    sentences = verdicts(report)
    text = [] if report.rows else ["no finished run yet"]
    if report.rows:
        heading = [
            "variant",
            "seeds",
            "perplexity [95 %]",
            f"to {BASELINE}",
            "HellaSwag",
            "tokens",
            "tok/s",
            "GiB",
        ]
        text += columns([heading, *(_terminal_row(row) for row in report.rows)], WIDTH)
        if any("?" in _terminal_row(row)[3] for row in report.rows):
            text.append(f"? {CANNOT_TELL}")
        text += _near_chance(report)
    wrapped = [wrap(line) for line in sentences]
    return "\n".join(
        [*(textwrap.fill(plain(line), WIDTH) if len(line) > WIDTH else line for line in text), "", *wrapped]
    )


def _seeds(row: Row) -> str:
    """Of how many the final loss is, and of how many there are."""
    ended = row.final_loss.count if row.final_loss else 0
    return str(ended) if ended == len(row.seeds) else f"{ended} of {len(row.seeds)}"


def _terminal_row(row: Row) -> list[str]:
    against = row.against_baseline
    move = row.allowance.move
    sure = against is not None and move is not None and against.reaching(move).contains_zero is False
    unsure = row.equivalent or not sure
    return [
        plain(inert(row.variant))[:14],
        _seeds(row),
        shown(row.final_loss),
        f"{percent(against.mean)}{'?' if unsure else ''}" if against else "-",
        score(row.hellaswag),
        f"{row.tokens / 1e6:,.2f}M",
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
        gibibytes(row),
    ]
