"""What a reader takes away from a report: the verdicts, why, what to do next, and what limits them."""

from __future__ import annotations

import math

from pages.components import color_label
from pages.document import Finding
from pages.markup import Code, Strong, Text
from ra.names import one_class
from study.analysis.equivalence import VarianceCheck
from study.analysis.sensitivity import SeedsNeeded, Sensitivity
from study.analysis.speed import Speed
from study.analysis.verdict import BETTER, CANNOT_TELL, EQUIVALENT, VERDICT_SEEDS, WORSE, Verdict
from study.records.runs import BASELINE
from study.report.build import Report, updates
from study.report.sentences import (
    ONE_SEED,
    difference,
    dof_text,
    hours_text,
    p_text,
    percent,
    seeds_text,
    shown,
    size,
    why_uncounted,
)
from study.stats.statistics import undetected_ratios

MAKE, MENUCONFIG = Code("make"), Code("make menuconfig")
NAMED = 8  # runs listed by name, above which they are counted


def findings(report: Report) -> list[Finding]:
    """The verdict of each real change with its number and its reason."""
    names = [row.variant for row in report.rows]
    verdicts = {verdict.variant: verdict for verdict in report.verdicts}
    found = []
    for row in report.rows:
        label = color_label(row.variant, names)
        if verdict := verdicts.get(row.variant):
            when = at_equal_time(report, row.variant)
            found.append(
                Finding(
                    label,
                    "unsure" if verdict.word == CANNOT_TELL else verdict.word,
                    f"{when}: {finding(verdict)}" if when else finding(verdict),
                    [numbers(verdict)],
                    verdict_sentence(report, verdict),
                    f"Why: {reason(report, verdict)}",
                )
            )
        elif not row.control:
            measured = difference(row.against_baseline, len(row.seeds))
            sentence: Text = (Strong(row.variant), f": {unjudged(report)}.")
            found.append(Finding(label, "unsure", unjudged(report), [f"{measured} to {BASELINE}"], sentence))
    return found


def control_findings(report: Report) -> list[Finding]:
    """The control arms with their numbers, which are noise."""
    names = [row.variant for row in report.rows]
    found = []
    for row in report.rows:
        if row.variant == BASELINE:
            said, measured = "the baseline", f"perplexity {shown(row.final_loss, len(row.seeds))}"
        else:
            said = f"{BASELINE} with W_Q and W_K renamed: noise"
            measured = difference(row.against_baseline, len(row.seeds))
        if row.control:
            found.append(Finding(color_label(row.variant, names), "same", said, [measured]))
    return found


def no_variant_to_judge(report: Report) -> str:
    """Say that a study has control arms only; "" where it has a real change."""
    if not report.rows or not all(row.control for row in report.rows):
        return ""
    few = f" This study: {ONE_SEED}." if max(len(row.seeds) for row in report.rows) == 1 else ""
    return (
        f"There is no variant to judge: {listed([row.variant for row in report.rows])} "
        f"{'is' if len(report.rows) == 1 else 'are'} the standard attention with other names for its weights.{few}"
    )


def at_equal_time(report: Report, variant: str) -> str:
    """How many updates a variant made beside the control arms; "" where they made the same number."""
    made = updates(report, variant)
    if made is None:
        return "at equal time" if report.equal_time else ""
    counts = f"({made[0]:,.0f} of {made[1]:,.0f} updates)"
    return f"at equal time {counts}" if report.equal_time else f"with another number of updates {counts}"


def finding(verdict: Verdict) -> str:
    """The verdict in a few words."""
    if verdict.word in (BETTER, WORSE):
        return f"{verdict.word} than standard attention"
    if verdict.word == EQUIVALENT:
        return f"equivalent to standard attention within {size(verdict.margin)}"
    if verdict.adjusted_p is None:
        return f"{CANNOT_TELL}: {seeds_text(verdict.seeds)}; a verdict needs {VERDICT_SEEDS}"
    return f"{CANNOT_TELL} whether it is better or worse than standard attention"


def numbers(verdict: Verdict) -> str:
    """The difference with its interval, the seeds and the p-value."""
    interval = verdict.test.difference
    text = f"perplexity {percent(interval.mean)}"
    if interval.low is not None and interval.high is not None:
        text += f", 95 % interval [{percent(interval.low)}, {percent(interval.high)}]"
    text += f", {seeds_text(verdict.seeds)}"
    return text if verdict.adjusted_p is None else f"{text}, {p_text(verdict.adjusted_p)}"


def verdict_sentence(report: Report, verdict: Verdict) -> Text:
    """One sentence on a real change. It begins with "at equal time" where counts follow step times."""
    when = at_equal_time(report, verdict.variant)
    start = f"{when[:1].upper()}{when[1:]}, " if when else ""
    verb = ":" if verdict.word == CANNOT_TELL else " is"
    return (start, Strong(verdict.variant), f"{verb} {finding(verdict)} ({numbers(verdict)}).")


def reason(report: Report, verdict: Verdict) -> str:
    """One sentence on why the verdict is the one it is."""
    name = verdict.variant
    if verdict.adjusted_p is None:
        return f"a verdict needs the variation of the difference over at least {VERDICT_SEEDS} seeds."
    if verdict.word == EQUIVALENT:
        low, high = verdict.test.narrow.low or 0.0, verdict.test.narrow.high or 0.0
        return (
            f"its 90 % interval [{percent(low)}, {percent(high)}] lies within {size(verdict.margin)} on either side "
            "of zero."
        )
    if verdict.word == CANNOT_TELL and verdict.test.difference.contains_zero is False:
        return (
            f"the interval excludes zero, but {verdict.judged_together} variants were tested, and chance alone makes "
            "one of them look different more often (Holm's correction)."
        )
    if verdict.word == CANNOT_TELL:
        return "the interval contains zero, so chance can explain the difference."
    arms = [row.variant for row in report.rows if row.control]
    standard = f"the mean of {listed(arms)}" if len(arms) > 1 else listed(arms)
    return (
        f"at each of {verdict.seeds} seeds {name} was compared with standard attention ({standard}). The difference is "
        "larger than its variation from seed to seed can explain."
    )


def unjudged(report: Report) -> str:
    """What is said about a real change without a verdict."""
    ended = " that ended its schedule" if report.cut else ""
    return f"{CANNOT_TELL}: no seed of it has a control arm{ended} to compare with"


def next_step(report: Report) -> Text:
    """What to do next: finish the runs, add seeds, or ask another question."""
    pending = [
        run.name for run in report.runs if run.status in ("missing", "interrupted", "running", "failed")
    ]
    if pending:
        verb = "is" if len(pending) == 1 else "are"
        unfinished = f"{len(pending)} of {len(report.runs)} runs {verb} not finished ({some(pending)})"
        return (f"Next: {unfinished}; fix: ", MAKE, " runs the missing ones.")
    edit = (" in .config (", MENUCONFIG, "), then ", MAKE, ". Finished runs stay.")
    if any(verdict.adjusted_p is None for verdict in report.verdicts):
        return (f"Next: add seeds; fix: set CONFIG_SEEDS={VERDICT_SEEDS}", *edit)
    if any(verdict.word == CANNOT_TELL for verdict in report.verdicts):
        needed = next(
            (row for seen in report.sensitivities for row in seen.needed if row.percent == 1.0), None
        )
        goal = f"add seeds: {seeds_needed(needed)}" if needed else "add seeds"
        return (f"Next: {goal}; fix: raise CONFIG_SEEDS", *edit)
    if report.verdicts:
        return (
            "Next: the result holds for this model, these data and this length of training. To test it further, train "
            "a larger model or train longer under another CONFIG_STUDY_NAME."
        )
    return ""


def context(report: Report) -> list[str]:
    """What limits the verdicts: the noise, the speed, runs that do not count."""
    controls = [row.variant for row in report.rows if row.control]
    lines = [line for speed in report.speeds for line in speed_sentences(speed)]
    if len(controls) > 1:
        lines.append(one_class(controls))
    if report.floor:
        lines.append(
            f"A/A difference observed: control arms at one seed differ by a standard deviation of "
            f"{report.floor.sigma:.2g} nats ({size(report.floor.sigma)} of perplexity), {dof_text(report.floor.dof)}. "
            "It plans seeds and checks the pipeline; no verdict uses it."
        )
    if report.odd_controls:
        lines.append(
            f"Warning: {listed(report.odd_controls)} differs from the other control arms by more than chance (paired "
            "t, 5 % after Holm). One study in 20 shows this by chance; otherwise the pipeline treats variants "
            "unequally."
        )
    if report.cut:
        lines.append(
            f"CONFIG_GPT2_HARD_LIMIT or a time limit cut {len(report.cut)} of {len(report.runs)} runs short "
            f"({some(report.cut)}). They count in no mean, no difference and no verdict."
        )
    if report.not_configured:
        lines.append(
            f"{len(report.not_configured)} finished runs are counted though .config does not ask for their seed or "
            f"variant now: {some(report.not_configured)}."
        )
    uncounted = [f"{run.name} ({why_uncounted(run)})" for run in report.runs if not run.used]
    if uncounted:
        lines.append(
            f"{len(uncounted)} of {len(report.runs)} runs {'is' if len(uncounted) == 1 else 'are'} not counted: "
            f"{', '.join(uncounted)}."
        )
    return lines


def speed_sentences(speed: Speed) -> list[str]:
    """The ratio of step times, and the difference to expect at equal time, without a verdict."""
    name = speed.variant
    bounds = f" [{speed.low:.3f}, {speed.high:.3f}]" if speed.low and speed.high else ""
    lines = [
        f"Speed: one update of {name} takes {speed.ratio:.3f}{bounds} times as long as one of the baseline."
    ]
    if speed.at_equal_time:
        low, high = speed.at_equal_time
        lines[0] += (
            f" At equal time the difference would be about {percent(low)} to {percent(high)} of perplexity (no "
            "verdict: the measured difference, moved along the control arms' late fall of the loss with ln(tokens) "
            "by the log of the step-time ratio)."
        )
    return lines


def power_sentences(seen: Sensitivity) -> list[str]:
    """The range of effects that the seeds detect, and the seeds that other effects need."""
    if seen.variant is not None:
        basis = f"from the spread of {seen.variant}'s differences over {seeds_text(seen.seeds)}"
    else:
        basis = f"if a variant varies like the control arms, {dof_text(seen.dof)}"
    rule = f"With {seen.at_seeds} seeds"
    if seen.mde_low > math.log(2):
        found = "even a doubling of perplexity may not be found"
    else:
        high = "more than 100 %" if seen.mde_high > math.log(2) else size(seen.mde_high)
        low = size(seen.mde_low).removesuffix(" %") if "more" not in high else size(seen.mde_low)
        found = f"a difference of {low} to {high} is found in 80 % of such studies"
    lines = [f"{rule} {found} (two-sided 5 %, before Holm; a range, since the noise is known only {basis})."]
    parts = [seeds_needed(row) for row in seen.needed]
    cost = (
        ""
        if seen.seed_hours is None
        else f" One more seed of all variants takes about {hours_text(seen.seed_hours)}."
    )
    return [*lines, f"Seeds needed: {'; '.join(parts)}.{cost}"]


def seeds_needed(row: SeedsNeeded) -> str:
    """The range of seeds that find a difference."""
    low, high = ("more than 1,000" if count is None else f"{count:,}" for count in (row.low, row.high))
    return f"{low if low == high else f'{low} to {high}'} for a difference of {row.percent:g} %"


def sensitivity_sentences(report: Report) -> list[str]:
    """What the study can see, and whether its control arms vary alike."""
    lines = [line for seen in report.sensitivities for line in power_sentences(seen)]
    if not lines:
        lines = [
            f"What this study can see is not known: no variant has {VERDICT_SEEDS} seeds, and no seed has two control "
            "arms that differ."
        ]
    return lines if report.variance_check is None else [*lines, variance_sentence(report.variance_check)]


def variance_sentence(seen: VarianceCheck) -> str:
    """Whether half-swapped arms vary like the fully swapped one, and which ratios the test cannot detect."""
    question = "Do half-swapped arms (RAEARLY, RALATE) vary as much as the fully swapped one (RAALL)?"
    if seen.test is None or not seen.enough:
        counts = f" ({seen.test.dof[0]} and {seen.test.dof[1]} degrees of freedom)" if seen.test else ""
        return f"{question} Too little data{counts}."
    a, b = seen.test.dof
    answer = "They differ" if seen.differs else "No difference found"
    low, high = undetected_ratios(a, b)
    return (
        f"{question} {answer}: variance of the effects of one half over that of both together {seen.test.ratio:.2f}, "
        f"F({a}, {b}), {p_text(seen.test.p_value)}; ratios from {low:.2g} to {high:.2g} cannot be told from 1."
    )


def run_names(report: Report) -> str:
    """How a run is named, by an example of this study."""
    run = next((run for run in report.runs if run.used), None)
    if run is None:
        return ""
    dot = next((run for run in report.runs if run.used and run.variant[-1:].isdigit()), None)
    text = f"A run is named by its variant and its seed: {run.name} is {run.variant} with seed {run.seed}"
    if dot is not None:
        text += f"; a dot separates a variant that ends in a digit from its seed, as in {dot.name}"
    return f"{text}."


def listed(names: list[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def some(names: list[str]) -> str:
    """The first NAMED names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
