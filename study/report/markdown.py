"""A report as Markdown for the reader, and as plain text for the terminal."""

from __future__ import annotations

import html
import re
import textwrap

from study.records.runs import BASELINE
from study.report.build import Report, Row
from study.report.method import method
from study.report.sentences import (
    difference,
    escape_markdown,
    item_result,
    percent,
    reason_text,
    score,
    shown,
)
from study.report.summary import context, first_screen, run_names, sensitivity_sentences

WIDTH = 100  # columns of the terminal


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def about_results() -> str:
    """The meaning of the table of results."""
    return (
        f"Perplexity after the last update, mean over seeds [95 % interval]. The difference to {BASELINE} is paired by "
        "seed, in percent of perplexity; lower is better. The verdict is the sentence at the top."
    )


def _results(report: Report) -> list[str]:
    rows = [
        [
            escape_markdown(row.variant),
            seeds_cell(row),
            shown(row.final_loss, len(row.seeds)),
            shown(row.best_loss, len(row.seeds)),
            difference(row.against_baseline, len(row.seeds)),
        ]
        for row in report.rows
    ]
    headings = [
        "variant",
        "number of seeds",
        "final perplexity",
        "best perplexity",
        f"final against {BASELINE}",
    ]
    lines = ["## Perplexity", "", about_results(), "", *table(headings, rows)]
    if len({(*row.seeds, seeds_cell(row)) for row in report.rows}) > 1:
        lines += [
            "",
            "The means are over different seeds and cannot be compared with each other; the differences can.",
        ]
    return lines


def _hellaswag(report: Report) -> list[str]:
    lines = ["## HellaSwag", ""]
    if all(row.hellaswag.acc is None for row in report.rows):
        reasons = dict.fromkeys(row.hellaswag.absent for row in report.rows)
        return [*lines, *(f"Not run: {reason_text(reason)}" for reason in reasons)]
    lines += table(
        ["variant", "acc", "acc_norm", "items", "runs"],
        [
            [
                escape_markdown(row.variant),
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
    lines += [f"{escape_markdown(row.variant)} not run: {reason_text(row.hellaswag.absent)}" for row in report.rows
              if row.hellaswag.acc is None]  # fmt: skip
    return lines


def _items(report: Report) -> list[str]:
    tests = report.items
    if not tests:
        return []
    names = dict.fromkeys(test.variant for test in tests)
    said = {(test.variant, test.measure): item_result(test) for test in tests}
    rows = [
        [escape_markdown(name), *(said.get((name, key), "-") for key in ("acc", "acc_norm"))]
        for name in names
    ]
    return [
        "",
        f"Item by item against {BASELINE} (items won / lost; McNemar's exact test, adjusted by Holm). It compares "
        "these trained runs on these items and contains no seed noise.",
        "",
        *table(["variant", "acc", "acc_norm"], rows),
    ]


def _power(report: Report) -> list[str]:
    return ["## What this study can see", "", *(f"- {line}" for line in sensitivity_sentences(report))]


def _near_chance(report: Report) -> list[str]:
    near = [escape_markdown(row.variant) for row in report.rows if row.hellaswag.near_chance]
    return (
        [f"† Within two standard errors of chance, so no sign of skill: {', '.join(near)}."] if near else []
    )


def gibibytes(row: Row) -> str:
    """The highest peak of the variant's runs."""
    return "-" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.2f}"


def _cost(report: Report) -> list[str]:
    def line(row: Row) -> list[str]:
        return [
            escape_markdown(row.variant),
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
    cut = [
        f"{escape_markdown(row.variant)} ({row.cut} of {len(row.seeds)})" for row in report.rows if row.cut
    ]
    if cut:
        lines += [
            "",
            f"Cut short (the learning rate did not finish its decay): {', '.join(cut)}.",
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
        lines += [*table([escape_markdown(name), *layers], rows), ""]
    return lines[:-1]


def _runs(report: Report) -> list[str]:
    rows = [
        [escape_markdown(run.name), run.status, "yes" if run.used else f"no: {escape_markdown(run.why_not)}"]
        for run in report.runs
    ]
    return ["## Runs", "", run_names(report), "", *table(["run", "status", "counted"], rows)]


def markdown(report: Report) -> str:
    """report.md."""
    target = report.target
    where = f" on {escape_markdown(target['device'])}, {escape_markdown(target['dtype'])}" if target else ""
    lines = [f"# {escape_markdown(report.study)}{where}"]
    for line in first_screen(report):
        lines += ["", line]
    if limits := context(report):
        lines += ["", *("- " + line for line in limits)]
    if not report.rows:
        lines += ["", "No finished run yet: there is nothing to compare."]
    else:
        for section in (_results, _power, _hellaswag, _cost, _learned):
            lines += ["", *section(report)] if section(report) else []
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {escape_markdown(note)}" for note in report.notes)]
    return "\n".join([*lines, "", *_runs(report), "", *method(report), ""])


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
    """At most 100 columns: the verdict and what to do next, the table, then what limits the verdict."""
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
        text += _near_chance(report)
    lines = [textwrap.fill(plain(line), WIDTH) if len(line) > WIDTH else line for line in text]
    blocks = [[wrap(line) for line in first_screen(report)], lines, [wrap(line) for line in context(report)]]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def seeds_cell(row: Row) -> str:
    """How many seeds the final loss is of, and of how many."""
    ended = row.final_loss.count if row.final_loss else 0
    return str(ended) if ended == len(row.seeds) else f"{ended} of {len(row.seeds)}"


def _terminal_row(row: Row) -> list[str]:
    against = row.against_baseline
    return [
        plain(escape_markdown(row.variant))[:14],
        seeds_cell(row),
        shown(row.final_loss),
        percent(against.mean) if against else "-",
        score(row.hellaswag),
        f"{row.tokens / 1e6:,.2f}M",
        f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
        gibibytes(row),
    ]
