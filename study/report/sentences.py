"""The sentences and the figures of a report: one difference, one interval, one verdict at a time."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

from ra.names import ONE_CLASS
from study.analysis.allowance import CARDS, NO_ALLOWANCE, SLOPES, TIMES, Allowance
from study.analysis.evidence import ItemTest, Sensitivity, Spread, WindowDifference
from study.analysis.timing import time_limit
from study.analysis.verdict import Judged
from study.records.hellaswag_scores import HellaSwagScore, near_chance
from study.records.runs import Run
from study.report.build import Report
from study.stats.statistics import Interval, perplexity_percent, undetected_ratios

CANNOT_TELL = "cannot tell"
UNKNOWN = {  # why a real change has no verdict at the end of its budget
    TIMES: "it ended neither at equal tokens nor at equal time",
    CARDS: "it ended at other tokens than the equivalent arms, on another card",
    SLOPES: "it ended neither at equal tokens nor at equal time, and what that may be worth is not known without "
    "an evaluation in the first half of each run (a smaller CONFIG_EVAL_INTERVAL_TOKENS), nor where a loss rose again",
}
ONE_SEED = "one seed, equivalent arms, differences are not evidence"


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
    value = perplexity_percent(difference)
    if abs(value) >= 1000:
        return f"{value:+.1e} %"
    digits = 2 if abs(value) >= 0.1 else 3
    return f"{value if round(value, digits) else 0.0:+.{digits}f} %"


def shown(interval: Interval | None, seeds: int | None = None) -> str:
    """A loss as perplexity, with its interval where there is one. seeds: as `change` has it."""
    if interval is None:
        return "-"
    text = perplexity(interval.mean)
    if interval.low is None or interval.high is None:
        return f"{text} (one seed)"
    return f"{text} [{perplexity(interval.low)}, {perplexity(interval.high)}]{_of_fewer(interval, seeds)}"


def _of_fewer(interval: Interval, seeds: int | None) -> str:
    return f" ({interval.count} of {seeds} seeds)" if seeds is not None and interval.count < seeds else ""


def change(
    interval: Interval | None, equivalent: bool, seeds: int | None = None, allowance: Allowance = NO_ALLOWANCE
) -> str:
    """A paired difference to the baseline as a change of perplexity, and what it allows one to say.

    seeds: that the variant has; where the difference is of fewer, it is said of how many. allowance: of the
    difference.
    """
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{percent(interval.mean)} (one seed: not evidence)"
    text = f"{percent(interval.mean)} [{percent(interval.low)}, {percent(interval.high)}]"
    text += _of_fewer(interval, seeds)
    if interval.contains_zero:
        return f"{text}: {CANNOT_TELL}"
    if allowance.move is None or interval.reaching(allowance.move).contains_zero:
        return f"{text}: {CANNOT_TELL}, as training was not equal"
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


def finding(judged: Judged) -> str:
    """What may be said of a variant that is a real change; never more than its interval allows."""
    difference = judged.result.difference
    if judged.beyond_noise:
        return f"{'better' if difference.mean < 0 else 'worse'} than the equivalent arms by more than their noise"
    if difference.contains_zero is not False:
        return f"{CANNOT_TELL}: its difference from the equivalent arms is within their noise"
    if judged.result.varies_more and judged.result.own.contains_zero is not False:
        return f"{CANNOT_TELL}: its runs vary more than the equivalent arms', and by their own spread it is noise"
    if judged.is_owed:
        worth = ", which may be worth as much" if judged.allowance.in_seconds else ""
        return f"{CANNOT_TELL}: {unequal(judged.allowance)}{worth}"
    return f"{CANNOT_TELL}: not beyond noise once {judged.judged_together} variants are compared"


def unequal(seen: Allowance) -> str:
    """In what its training was not that of the equivalent arms."""
    if seen.in_seconds:
        return f"it trained for {'less' if seen.own < seen.arms else 'more'} time than the equivalent arms"
    length = "shorter" if seen.own < seen.arms else "longer"
    return f"its schedule is {length} than the equivalent arms', so that learning rates may differ at these tokens"


def grounds(judged: Judged) -> str:
    """The numbers behind it."""
    difference = judged.result.difference
    assert difference.low is not None
    assert difference.high is not None
    bounds = f"[{percent(difference.low)}, {percent(difference.high)}]"
    numbers = f"perplexity {percent(difference.mean)}, 95 % interval {bounds}"
    said = f"{numbers}; {seeds_text(difference.count)}"
    if judged.allowance.move is not None:
        said += f", {p_text(judged.adjusted_p)}"
    own, seen = judged.result.own, judged.result.variance
    if judged.result.varies_more and seen is not None and own.low is not None and own.high is not None:
        said += (
            f"; its runs vary more than the arms', variance ratio {seen.ratio:.1f}, {p_text(seen.p_value)}: "
            f"the interval of their own spread is [{percent(own.low)}, {percent(own.high)}]"
        )
    return said + _allowed(judged)


def _allowed(judged: Judged) -> str:
    """What the allowance leaves of the interval, where it matters."""
    difference, allowance = judged.result.difference, judged.allowance
    if allowance.move is None:
        return f"; its schedule is {allowance.own:,.0f} tokens long, the arms' {allowance.arms:,.0f}"
    wider = difference.reaching(allowance.move)
    if not judged.allowance_matters or wider.low is None or wider.high is None:
        return ""
    had = f"trained for {_times(allowance.own, allowance.arms)}"
    return f"; {had}: with what that may be worth [{percent(wider.low)}, {percent(wider.high)}]"


def _times(own: float, arms: float) -> str:
    """Seconds of training of a variant and of the equivalent arms."""
    digits = 0 if min(own, arms) >= 100 else 1
    return f"{own:,.{digits}f} s, the equivalent arms for {arms:,.{digits}f} s"


def verdict(judged: Judged, where: str = "") -> str:
    """One sentence on a variant that is a real change."""
    return f"**{inert(judged.variant)}**{where}: {finding(judged)} ({grounds(judged)})."


def unjudged(report: Report, variant: str) -> str:
    """What is said of a real change that has no verdict at the end of its budget."""
    if variant in report.misplanned:
        seen = report.misplanned[variant]
        return f"{CANNOT_TELL}: {UNKNOWN[seen.why]} (trained for {_times(seen.own, seen.arms)})"
    ended = " that ended their schedule" if report.cut else ""
    return f"{CANNOT_TELL}: no seed of it has equivalent arms{ended} to measure the noise with"


def told_early(report: Report) -> list[str]:
    """What is said of variants that trained for much less than they were given: planned on a slower machine."""
    rows = [row for row in report.rows if row.variant in report.early]
    if not rows:
        return []
    names = ", ".join(f"{inert(row.variant)} {row.train_seconds:,.0f} s" for row in rows)
    return [
        f"Trained for much less than the {time_limit(report.budget):,.0f} s that a run was given: {names}. Step times "
        "are measured when a study begins, and the machine was slower then. Final losses are those of shorter "
        "schedules, not of equal time: begin again under another CONFIG_STUDY_NAME on a quiet machine."
    ]


def verdicts(report: Report) -> list[str]:
    """The sentences that a reader takes away, the most important first."""
    end = "" if report.same_point else " at the end of its budget"
    lines = [verdict(judged, end) for judged in report.judged]
    if not report.same_point:
        at = f" at equal tokens ({report.equal_tokens or 0:,})"
        lines += [verdict(judged, at) for judged in report.judged_equal_tokens]
    told = {judged.variant for judged in report.judged}
    lines += [
        f"**{inert(row.variant)}**{end if row.variant in report.misplanned else ''}: {unjudged(report, row.variant)}."
        for row in report.rows
        if not row.equivalent and row.variant not in told
    ]
    if report.cut:
        names = ", ".join(inert(name) for name in report.cut)
        lines.append(
            f"The training clock cut the schedule of {len(report.cut)} of {len(report.runs)} runs short ({names}): the "
            "machine was slower than when it was planned. They ended before the others, so their final losses count in "
            "no mean, no difference, no noise floor and no verdict; at equal tokens they do."
        )
    lines += told_early(report)
    if sum(row.equivalent for row in report.rows) > 1:
        lines.append(ONE_CLASS)
    if report.floor:
        lines.append(
            "Noise floor: runs of equivalent arms at one seed differ by a standard deviation of "
            f"{report.floor.sigma:.2g} nats ({percent(report.floor.sigma).lstrip('+')} of perplexity), "
            f"{dof_text(report.floor.dof)}."
        )
    if report.rows and max(len(row.seeds) for row in report.rows) == 1:
        lines.append(
            f"This study: {ONE_SEED}."
            if all(row.equivalent for row in report.rows)
            else "One seed: the order of the equivalent arms is not evidence, no ranking is given, and a verdict is "
            "one on this seed alone, if the variant's runs vary as the arms do, which one seed cannot show."
        )
    if report.judged and differs(report.evidence.spread):
        lines.append(
            "Half-swapped and fully swapped arms did not vary alike, so that the noise floor is a mean of two; take "
            "the verdicts with that in mind."
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


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def dof_text(dof: int) -> str:
    return "1 degree of freedom" if dof == 1 else f"{dof} degrees of freedom"


def seeds_text(count: int) -> str:
    return "one seed" if count == 1 else f"{count:,} seeds"


def hours_text(hours: float) -> str:
    """A length of time in the unit that one would say it in."""
    if hours >= 1.5:
        return f"{hours:,.1f} hours" if hours < 10 else f"{hours:,.0f} hours"
    minutes = max(1, round(60 * hours))
    return "1 minute" if minutes == 1 else f"{minutes} minutes"


def visible(seen: Sensitivity | None) -> list[str]:
    """Two sentences: the effect that the seeds at hand show, and the seeds that other effects need."""
    if seen is None:
        return [
            "What this study can see is not known: no seed has two equivalent arms that differ, so no noise floor."
        ]
    basis = f"two-sided 5 %, before Holm; noise floor as measured, {dof_text(seen.dof)}"
    if seen.wider:
        basis = (
            f"two-sided 5 %, before Holm; by the spread of {inert(seen.wider)}'s own runs, which vary more than the "
            f"arms', {dof_text(seen.seeds - 1)}"
        )
    if seen.smallest > math.log(2):
        found = f"even a doubling of perplexity may go unseen ({basis})."
    else:
        smallest = percent(seen.smallest).lstrip("+")
        found = f"a real change of {smallest} of perplexity is found in 80 % of such studies ({basis})."
    lines = [f"With {seeds_text(seen.seeds)} {found}"]
    far = [f"{plan.percent:g}" for plan in seen.planned if plan.seeds is None]
    near = [plan for plan in seen.planned if plan.seeds is not None and plan.more]
    there = [plan.percent for plan in seen.planned if plan.seeds is not None and not plan.more]
    said = [f"to see {' or '.join(far)} % you need more than 1,000 seeds"] if far else []
    for plan in near:
        cost = "" if plan.hours is None else f", about {hours_text(plan.hours)}"
        said.append(
            f"to see {plan.percent:g} % you need {seeds_text(plan.seeds or 0)} ({plan.more:,} more{cost})"
        )
    if there:
        said.append(f"for {min(there):g} % and more the seeds at hand suffice")
    text = "; ".join(said)
    return [*lines, f"{text[:1].upper()}{text[1:]}."]


def not_of_seeds(judged: Sequence[Judged]) -> list[str]:
    """What real changes have to show beyond what seeds can."""
    return [
        f"{inert(seen.variant)}: {unequal(seen.allowance)}, which may be worth "
        f"{percent(abs(seen.allowance.move or 0.0)).lstrip('+')} of perplexity: to be called "
        f"{'worse' if (seen.allowance.move or 0.0) < 0 else 'better'} it has to be so by that much as well, and more "
        "seeds do not make it less."
        for seen in judged
        if seen.allowance_matters
    ]


def differs(seen: Spread) -> bool:
    """Whether the two kinds of arms were seen to vary differently."""
    return seen.test is not None and seen.enough and seen.test.p_value < 0.05


def alike(seen: Spread) -> str:
    """Whether half-swapped arms vary as the fully swapped one, and which differences would have gone unseen."""
    what = "Do half-swapped arms (RAEARLY, RALATE) vary as much as the fully swapped one (RAALL)?"
    if seen.test is None or not seen.enough:
        counts = f" ({seen.test.dof[0]} and {seen.test.dof[1]} degrees of freedom)" if seen.test else ""
        return f"{what} Too little data{counts}."
    a, b = seen.test.dof
    answer = "They differ" if differs(seen) else "No difference seen"
    low, high = undetected_ratios(a, b)
    return (
        f"{what} {answer}: variance of what a half does alone over that of what only both do {seen.test.ratio:.2f}, "
        f"F({a}, {b}), {p_text(seen.test.p_value)}; ratios from {low:.2g} to {high:.2g} cannot be told from 1."
    )


def by_item(test: ItemTest) -> str:
    """Items won and lost against the baseline, and what they allow one to say of these runs."""
    said = (
        CANNOT_TELL
        if test.adjusted_p >= 0.05
        else ("more right" if test.wins > test.losses else "fewer right")
    )
    return f"+{test.wins:,} / -{test.losses:,}, {p_text(test.adjusted_p)}: {said}"


def by_window(seen: WindowDifference) -> str:
    """The paired difference over windows, without a verdict: it has no seed noise in it."""
    text = percent(seen.difference.mean)
    if seen.difference.low is None or seen.difference.high is None:
        return text
    return f"{text} [{percent(seen.difference.low)}, {percent(seen.difference.high)}]"
