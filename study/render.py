"""A report's numbers in words: Markdown for the reader, a plain table for the terminal."""

from __future__ import annotations

import html
import math
import re

from study.report import BASELINE, HellaSwagScore, Interval, Judged, Report, Row

ONE_CLASS = (
    "B, RAEARLY, RALATE, RAALL, RAALT and RA:... are one function class with one initial distribution (a reciprocal "
    "layer is a standard layer with W_Q and W_K renamed): differences among them are noise, and their spread is the "
    "measured noise floor."
)
CANNOT_TELL = "cannot tell"


def inert(text: str) -> str:
    """Text of a record so that neither Markdown nor HTML in it has an effect, on one line."""
    return re.sub(r"([\\`*_{}\[\]#|!~])", r"\\\1", html.escape(" ".join(text.split())))


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def percent(difference: float) -> str:
    """A difference of losses as the change of perplexity it is."""
    return f"{100 * math.expm1(difference):+.2f} %"


def shown(interval: Interval | None) -> str:
    """A loss as perplexity, with its interval where there is one."""
    if interval is None:
        return "-"
    text = f"{perplexity(interval.mean):.2f}"
    if interval.low is None or interval.high is None:
        return f"{text} (one seed)"
    return f"{text} [{perplexity(interval.low):.2f}, {perplexity(interval.high):.2f}]"


def change(interval: Interval | None) -> str:
    """A paired difference as a change of perplexity, and what it allows one to say."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{percent(interval.mean)} (one seed: not evidence)"
    text = f"{percent(interval.mean)} [{percent(interval.low)}, {percent(interval.high)}]"
    return f"{text}: {CANNOT_TELL}" if interval.contains_zero else text


def score(value: HellaSwagScore, norm: bool = False) -> str:
    rate, error = (value.acc_norm, value.acc_norm_stderr) if norm else (value.acc, value.acc_stderr)
    return "not run" if rate is None or error is None else f"{100 * rate:.1f} ± {100 * error:.1f} %"


def verdict(judged: Judged) -> str:
    """One sentence on a variant that is a real change; never more than its interval allows."""
    difference = judged.result.difference
    assert difference.low is not None
    assert difference.high is not None
    bounds = f"[{percent(difference.low)}, {percent(difference.high)}]"
    interval = f"{percent(difference.mean)} perplexity, 95 % interval {bounds}"
    seeds = f"{difference.count} seed{'s' if difference.count > 1 else ''}"
    if difference.contains_zero or judged.adjusted_p >= 0.05:
        said = f"{CANNOT_TELL}: its difference from the equivalent arms is within their noise"
    else:
        said = f"{'better' if difference.mean < 0 else 'worse'} than the equivalent arms by more than their noise"
    return f"**{inert(judged.variant)}**: {said} ({interval}; {seeds}, adjusted p = {judged.adjusted_p:.3g})."


def verdicts(report: Report) -> list[str]:
    lines = [verdict(judged) for judged in report.judged]
    told = {judged.variant for judged in report.judged}
    lines += [
        f"**{inert(row.variant)}**: {CANNOT_TELL}: no seed has two equivalent arms to measure the noise with."
        for row in report.rows
        if not row.equivalent and row.variant not in told
    ]
    arms = [row for row in report.rows if row.equivalent]
    if len(arms) > 1:
        lines.append(ONE_CLASS)
    if report.floor:
        lines.append(
            f"Noise floor: runs of equivalent arms at one seed differ by a standard deviation of "
            f"{report.floor.sigma:.4f} nats ({100 * math.expm1(report.floor.sigma):.2f} % of perplexity), "
            f"{report.floor.freedom} degrees of freedom."
        )
    if arms and max(len(row.seeds) for row in report.rows) == 1:
        lines.append("One seed: the order of the equivalent arms is not evidence, and no ranking is given.")
    return lines


def table(headings: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _results(report: Report) -> list[str]:
    tokens = report.equal_tokens
    about = (
        "At equal time (each variant's own final step). Mean over seeds [95 % interval]; the difference to "
    )
    lines = ["## Perplexity", "", f"{about}{BASELINE} is paired by seed.", ""]
    lines += table(
        ["variant", "seeds", "final", "best", f"to {BASELINE}"],
        [
            [
                inert(row.variant),
                str(len(row.seeds)),
                shown(row.final_loss),
                shown(row.best_loss),
                change(row.against_baseline),
            ]
            for row in report.rows
        ],
    )
    if tokens:
        lines += ["", f"At equal tokens ({tokens:,}, the last point that every run was evaluated at).", ""]
        lines += table(
            ["variant", "perplexity", f"to {BASELINE}"],
            [
                [inert(row.variant), shown(row.equal_tokens_loss), change(row.against_baseline_equal_tokens)]
                for row in report.rows
            ],
        )
    else:
        lines += ["", "At equal tokens: the runs share no point of evaluation."]
    return lines


def _hellaswag(report: Report) -> list[str]:
    lines = ["## HellaSwag", ""]
    if all(row.hellaswag.acc is None for row in report.rows):
        reasons = dict.fromkeys(row.hellaswag.absent for row in report.rows)
        return [*lines, *(f"Not run: {inert(reason)}." for reason in reasons)]
    lines += table(
        ["variant", "acc", "acc_norm", "items"],
        [
            [
                inert(row.variant),
                score(row.hellaswag),
                score(row.hellaswag, norm=True),
                str(row.hellaswag.items or "-"),
            ]
            for row in report.rows
        ],
    )
    lines += ["", "± one standard error of the items; chance is 25 %."]
    near = [inert(row.variant) for row in report.rows if row.hellaswag.near_chance]
    if near:
        lines.append(f"Within two standard errors of chance, so no sign of skill: {', '.join(near)}.")
    lines += [f"{inert(row.variant)} not run: {inert(row.hellaswag.absent)}." for row in report.rows
              if row.hellaswag.acc is None]  # fmt: skip
    return lines


def _cost(report: Report) -> list[str]:
    def line(row: Row) -> list[str]:
        return [
            inert(row.variant),
            f"{row.iterations:,.0f}",
            f"{row.tokens:,.0f}",
            f"{row.train_seconds:,.1f}",
            f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-",
            f"{100 * row.mfu:.1f} %" if row.mfu else "-",
            f"{row.peak_memory_bytes / 2**30:.2f}",
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
        "Probability of the reciprocal path, layer by layer, mean over seeds.",
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


METHOD = """## Method

- Losses are mean nats a token on fixed validation windows; perplexity is exp(loss). Means and differences are made
  of losses, so a difference is the logarithm of a ratio of perplexities and is shown as a percentage of perplexity.
- Differences to B are paired by seed: both runs saw the same batches in the same order from the same initial
  weights. Their intervals are Student's t over seeds.
- The noise floor pools the equivalent arms within each seed (S(k-1) degrees of freedom for S seeds of k arms). A
  variant that is a real change is compared with the mean of those arms at the same seeds; under no effect the
  difference has variance sigma²(1 + 1/k) a seed. p-values are adjusted by Holm's method over such variants.
- HellaSwag's standard error is that of the items; more seeds answer the same items and do not shrink it.
- "cannot tell" stands wherever an interval contains zero."""


def markdown(report: Report) -> str:
    """report.md."""
    where = f" on {inert(report.target['device'])}, {report.target['dtype']}" if report.target else ""
    parts = [f"# {inert(report.study)}{where}", *("- " + line for line in verdicts(report))]
    lines = [parts[0], "", *parts[1:]]
    if not report.rows:
        lines += ["No finished run yet: there is nothing to compare."]
    else:
        for section in (_results, _hellaswag, _cost, _learned):
            lines += ["", *section(report)] if section(report) else []
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {inert(note)}" for note in report.notes)]
    return "\n".join([*lines, "", *_runs(report), "", METHOD, ""])


def plain(text: str) -> str:
    """A Markdown sentence for the terminal."""
    return html.unescape(re.sub(r"\\(.)", r"\1", text.replace("**", "")))


def terminal(report: Report) -> str:
    """At most 100 columns: the table, then the verdicts."""
    if not report.rows:
        return "no finished run yet"
    head = f"{'variant':<12}{'seeds':>5}{'perplexity [95 %]':>26}{'to B':>10}{'HellaSwag':>15}"
    head += f"{'tokens':>9}{'tok/s':>9}{'GiB':>6}"
    lines = [head]
    for row in report.rows:
        against = percent(row.against_baseline.mean) if row.against_baseline else "-"
        mark = "?" if row.against_baseline and row.against_baseline.contains_zero is not False else ""
        lines.append(
            f"{plain(row.variant)[:12]:<12}{len(row.seeds):>5}{shown(row.final_loss):>26}{against + mark:>10}"
            f"{score(row.hellaswag):>15}{row.tokens / 1e6:>8.2f}M{row.tokens_per_second or 0:>9,.0f}"
            f"{row.peak_memory_bytes / 2**30:>6.2f}"
        )
    if any(row.against_baseline and row.against_baseline.contains_zero is not False for row in report.rows):
        lines.append("? cannot tell")
    uncounted = [f"{run.name} ({run.status})" for run in report.runs if not run.used]
    if uncounted:
        lines.append(f"not counted: {', '.join(uncounted)}")
    return "\n".join([*lines, "", *(plain(line) for line in verdicts(report))])
