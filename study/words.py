"""The sentences and the figures of a report: one difference, one interval, one verdict at a time."""

from __future__ import annotations

import html
import math
import re

from study.report import Judged, Report
from study.runs import Run
from study.scores import HellaSwagScore, near_chance
from study.statistics import Interval

ONE_CLASS = (
    "B, RAEARLY, RALATE, RAALL, RAALT and RA:... are one function class with one initial distribution (a reciprocal "
    "layer is a standard layer with W_Q and W_K renamed): differences among them are noise, and their spread is the "
    "measured noise floor."
)
CANNOT_TELL = "cannot tell"


def inert(text: str) -> str:
    """Text of a record so that no Markdown, HTML, link or control character in it has an effect, on one line."""
    line = " ".join(text.split())
    line = html.escape("".join(sign for sign in line if sign.isprintable()), quote=False)
    line = re.sub(r"([\\`*_{}\[\]#|!~])", r"\\\1", line)
    return re.sub(r"(?i)(:)(?=//)|(?<=www)(\.)", r"\\\1\2", line)


def perplexity(loss: float) -> str:
    """exp(loss) in as many digits as anyone reads."""
    value = math.exp(min(loss, 700.0))
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def percent(difference: float) -> str:
    """A difference of losses as the change of perplexity it is."""
    value = 100 * math.expm1(min(difference, 700.0))
    if abs(value) >= 1000:
        return f"{value:+.1e} %"
    digits = 2 if abs(value) >= 0.1 else 3
    return f"{value if round(value, digits) else 0.0:+.{digits}f} %"


def shown(interval: Interval | None) -> str:
    """A loss as perplexity, with its interval where there is one."""
    if interval is None:
        return "-"
    text = perplexity(interval.mean)
    if interval.low is None or interval.high is None:
        return f"{text} (one seed)"
    return f"{text} [{perplexity(interval.low)}, {perplexity(interval.high)}]"


def change(interval: Interval | None, equivalent: bool) -> str:
    """A paired difference to the baseline as a change of perplexity, and what it allows one to say."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{percent(interval.mean)} (one seed: not evidence)"
    text = f"{percent(interval.mean)} [{percent(interval.low)}, {percent(interval.high)}]"
    if interval.contains_zero:
        return f"{text}: {CANNOT_TELL}"
    return f"{text}: noise, since it is the same function class" if equivalent else text


def score(value: HellaSwagScore, norm: bool = False) -> str:
    """An accuracy with its standard error; † marks one that is within two of them of chance."""
    rate, error = (value.acc_norm, value.acc_norm_stderr) if norm else (value.acc, value.acc_stderr)
    if rate is None or error is None:
        return "not run"
    return f"{100 * rate:.1f} ± {100 * error:.1f} %{' †' if near_chance(rate, error) else ''}"


def sentence(text: str) -> str:
    """A reason of a record, inert, with exactly one full stop."""
    return inert(text).rstrip(". ") + "."


def verdict(judged: Judged, where: str = "") -> str:
    """One sentence on a variant that is a real change; never more than its interval allows."""
    difference = judged.result.difference
    assert difference.low is not None
    assert difference.high is not None
    significant = judged.adjusted_p < 0.05
    if difference.contains_zero:
        said = f"{CANNOT_TELL}: its difference from the equivalent arms is within their noise"
    elif not significant:
        said = f"{CANNOT_TELL}: not beyond noise once {judged.judged_together} variants are compared"
    else:
        said = f"{'better' if difference.mean < 0 else 'worse'} than the equivalent arms by more than their noise"
    p = "p < 0.001" if judged.adjusted_p < 0.001 else f"p = {judged.adjusted_p:.3f}"
    seeds = "one seed" if difference.count == 1 else f"{difference.count} seeds"
    bounds = f"[{percent(difference.low)}, {percent(difference.high)}]"
    numbers = f"perplexity {percent(difference.mean)}, 95 % interval {bounds}; {seeds}, {p}"
    return f"**{inert(judged.variant)}**{where}: {said} ({numbers})."


def verdicts(report: Report) -> list[str]:
    """The sentences that a reader takes away, the most important first."""
    lines = [verdict(judged) for judged in report.judged]
    if not report.same_point:
        at = f" at equal tokens ({report.equal_tokens or 0:,})"
        lines += [verdict(judged, at) for judged in report.judged_equal_tokens]
    told = {judged.variant for judged in report.judged}
    lines += [
        f"**{inert(row.variant)}**: {CANNOT_TELL}: no seed of it has equivalent arms to measure the noise with."
        for row in report.rows
        if not row.equivalent and row.variant not in told
    ]
    if sum(row.equivalent for row in report.rows) > 1:
        lines.append(ONE_CLASS)
    if report.floor:
        lines.append(
            "Noise floor: runs of equivalent arms at one seed differ by a standard deviation of "
            f"{report.floor.sigma:.2g} nats ({percent(report.floor.sigma).lstrip('+')} of perplexity), "
            f"{report.floor.freedom} degrees of freedom."
        )
    if report.rows and max(len(row.seeds) for row in report.rows) == 1:
        lines.append(
            "One seed: the order of the equivalent arms is not evidence, no ranking is given, and a verdict is one "
            "on this seed alone."
        )
    uncounted = [run for run in report.runs if not run.used]
    if uncounted:
        lines.append(
            f"{len(uncounted)} of {len(report.runs)} runs are not counted: "
            + ", ".join(f"{inert(run.name)} ({standing(run)})" for run in uncounted)
            + "."
        )
    return lines


def standing(run: Run) -> str:
    """Why a run is not counted, in a word or two."""
    return "not comparable" if run.status == "finished" else run.status
