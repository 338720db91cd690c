"""The first screen of a report: the verdicts, their reasons, the next step, and the limits of the verdicts."""

from __future__ import annotations

import math

from ra.arms import control_groups, custom_variants, files_with, one_class, parse_arm, published_variants
from referee.pages.document import Finding
from referee.pages.markup import Code, Strong, Text
from referee.verdict.design import Design
from referee.verdict.looks import nominal_levels
from referee.verdict.statistics import mean, percent, undetected_ratios
from study.analysis.designs import SeedsNeeded, Sensitivity
from study.analysis.verdict import (
    BETTER,
    CANNOT_TELL,
    EQUIVALENT,
    INTERIM,
    NO_ANSWER,
    PRIMARY,
    VERDICT_SEEDS,
    WORSE,
    TunedVerdicts,
    VarianceCheck,
    Verdict,
    at_rate_of_controls,
)
from study.arm_colors import color_label
from study.plan_file import ALTERED
from study.report.method import (
    ONE_SEED,
    difference,
    dof_text,
    hours_text,
    listed,
    p_text,
    seeds_text,
    size,
    some,
    uncounted,
)
from study.report.report_data import Report
from study.report.report_sections import edge_sentences
from study.runs import BASELINE, DIVERGED
from study.step_timing import Speed


def power_sentences(estimate: Sensitivity) -> list[str]:
    """The range of differences that the seeds detect, and the seeds that other differences need."""
    arm, source = "A new variant", "assuming that it varies like the control arms"
    if estimate.variant is not None:
        arm, source = estimate.variant, f"from its differences at {seeds_text(estimate.seeds)}"
    noise = f"The range comes from the uncertain noise: {dof_text(estimate.dof)}, {source}."
    if estimate.mde_low > math.log(2):
        found = "may miss even a doubling of perplexity; the power is below 80 %"
    else:
        high = "more than 100 %" if estimate.mde_high > math.log(2) else size(estimate.mde_high)
        low = size(estimate.mde_low).removesuffix(" %") if "more" not in high else size(estimate.mde_low)
        found = f"detect a difference of {low} to {high} with 80 % probability"
    test = f"two-sided test, level {100 * estimate.level:.2g} %, before Holm"
    power = f"{arm}: {seeds_text(estimate.at_seeds)} {found} ({test}). {noise}"
    needed = f"{arm}, seeds to plan in a new study: {'; '.join(map(seeds_needed, estimate.needed))}."
    if estimate.raised:
        needed += (
            " A larger CONFIG_SEEDS in this study is another look at a stricter level; seeds needed in all: "
            f"{seeds_needed(estimate.raised)}."
        )
    return [power, needed]


def seeds_needed(row: SeedsNeeded) -> str:
    """The range of seeds that detect a difference."""
    low, high = ("more than 1,000" if count is None else f"{count:,}" for count in (row.low, row.high))
    return f"{low if low == high else f'{low} to {high}'} for a difference of {row.percent:g} %"


def sensitivity_sentences(report: Report) -> list[str]:
    """The differences that the study can detect, and whether its control arms vary alike."""
    unknown = (
        f"The detectable differences are not known: no variant has {VERDICT_SEEDS} seeds, and no seed has two control "
        "arms that differ."
    )
    lines = [line for estimate in report.sensitivities for line in power_sentences(estimate)] or [unknown]
    if hours := next((one.seed_hours for one in report.sensitivities if one.seed_hours is not None), None):
        lines.append(f"One more seed of all variants takes about {hours_text(hours)}.")
    return lines if report.variance_check is None else [*lines, variance_sentence(report.variance_check)]


def variance_sentence(check: VarianceCheck) -> str:
    """Whether the control arms vary alike and independently, and which ratios the tests cannot detect."""
    question = "Do the control arms vary alike and independently of each other?"
    if not check.tests:
        return f"{question} Too little data."
    if not check.enough:
        a, b = check.tests[0].dof
        return f"{question} Too little data ({a} and {b} degrees of freedom)."
    answer = "No" if check.differs else "No difference found"
    names = (
        "the effects of one half over that of both together",
        "the effect of the early half over that of the late",
    )
    found = []
    for name, test, p in zip(names, check.tests, check.adjusted_p, strict=True):
        low, high = undetected_ratios(*test.dof)
        found.append(
            f"variance of {name} {test.ratio:.2f}, F{test.dof}, {p_text(p)}; ratios from {low:.2g} to {high:.2g} "
            "cannot be distinguished from 1"
        )
    consequence = (
        " Arms that agree with each other count as several: the A/A difference and the seeds needed are uncertain. "
        "No verdict uses them."
    )
    return f"{question} {answer}: {'. '.join(found)}.{consequence if check.differs else ''}"


MAKE, MENUCONFIG = Code("make"), Code("make menuconfig")
DEMO = "demo"  # the study of `make demo`, which no .config describes
DEMO_ARMS = frozenset(("B", "RAALL", "NOPE", "B+WD=0.1", "RALEARN"))


def findings(report: Report) -> list[Finding]:
    """The verdict of each real change with its number and its reason, the primary comparison first."""
    verdicts = {verdict.variant: verdict for verdict in report.verdicts}
    primary = {name for name, verdict in verdicts.items() if verdict.role == PRIMARY}
    found = []
    for row in sorted(report.rows, key=lambda row: row.variant not in primary):
        label = color_label(row.variant, report.variants)
        if verdict := verdicts.get(row.variant):
            when = at_equal_time(report, row.variant)
            statement = ": ".join(filter(None, [verdict.role, when, finding(verdict)]))
            kind, verb = kind_and_verb(verdict)
            start = f"{when[:1].upper()}{when[1:]}, " if when else ""
            rest = f" ({verdict.role}){verb} {finding(verdict)} ({numbers(verdict)})."
            sentence: Text = (start, Strong(verdict.variant), rest)
            why = f"Why: {said}" if (said := reason(report, verdict)) else ""
            found.append(Finding(label, kind, statement, numbers(verdict), sentence, why))
        elif not row.control and report.tuned is None:
            rate = parse_arm(row.variant).rate
            missing = f"control arm with LR={rate}" if rate else "control arm"
            ended = " that ended its schedule" if report.cut else ""
            said = f"{CANNOT_TELL}: no seed of it has a {missing}{ended} to compare with"
            sentence = (Strong(row.variant), f": {said}.")
            found.append(Finding(label, "unsure", said, difference(None), sentence))
    return found


def kind_and_verb(verdict: Verdict) -> tuple[str, str]:
    return ("unsure", ":") if verdict.word in NO_ANSWER else (verdict.word, " is")


def common_findings(report: Report) -> list[Finding]:
    """The verdicts with every arm at the rate of the control arms."""
    found = []
    for verdict in report.tuned.common if report.tuned else []:
        kind, verb = kind_and_verb(verdict)
        sentence: Text = (Strong(verdict.variant), f"{verb} {finding(verdict)} ({numbers(verdict)}).")
        label = color_label(verdict.variant, report.variants)
        found.append(Finding(label, kind, finding(verdict), numbers(verdict), sentence))
    return found


def no_verdict(report: Report) -> Text:
    """Say why no variant has a verdict: its runs are pending, or the study has control arms only; else ""."""
    if not report.rows or not all(row.control for row in report.rows):
        return ""
    changed = [run for run in report.runs if run.seed is not None and not parse_arm(run.variant).is_control]
    if changed:
        names = list(dict.fromkeys(run.variant for run in changed))
        without = "counted" if any(run.status == "finished" for run in changed) else "finished"
        return f"No verdict yet: {listed(names)} {'has' if len(names) == 1 else 'have'} no {without} run."
    few = f" This study: {ONE_SEED}." if max(len(row.seeds) for row in report.rows) == 1 else ""
    why = f"all variants are control arms ({BASELINE} with W_Q and W_K renamed)"
    if len(report.rows) == 1:
        why = f"{report.rows[0].variant} is the only variant"
    fix = ("fix: add a variant such as RALEARN to CONFIG_VARIANTS (", MENUCONFIG, "), then ", MAKE, ".")
    return (f"No verdict: {why}.{few} ", *fix)


def at_equal_time(report: Report, variant: str) -> str:
    """How many updates a variant made beside the control arms; "" where they made the same number."""
    made = mean([row.iterations for row in report.rows if row.variant == variant])
    controls = mean([row.iterations for row in report.rows if row.control])
    if made == controls:
        return "at equal time" if report.equal_time else ""
    counts = f"({made:,.0f} of {controls:,.0f} updates)"
    return f"at equal time {counts}" if report.equal_time else f"with another number of updates {counts}"


def contrast(name: str) -> str:
    """Name the reference of an arm. An arm with standard attention differs in another part."""
    attention = parse_arm(name).attention
    other_parts = {*published_variants(), *custom_variants()} - {*files_with("attention")}
    same = parse_arm(attention).is_control or attention in other_parts
    return "the control arms" if same else "standard attention"


def finding(verdict: Verdict) -> str:
    """The verdict in a few words."""
    other = contrast(verdict.variant)
    if verdict.word in (BETTER, WORSE):
        return f"{verdict.word} than {other}"
    if verdict.word == EQUIVALENT:
        return f"equivalent to {other} within {size(verdict.margin)}"
    if verdict.word == INTERIM:
        return f"{INTERIM}, {verdict.finished} of {verdict.looks[-1]} planned seeds finished"
    if verdict.adjusted_p is None:
        return f"{CANNOT_TELL}, {verdict.seeds} of {VERDICT_SEEDS} needed seeds finished"
    return f"{CANNOT_TELL} whether it is better or worse than {other}"


def numbers(verdict: Verdict) -> str:
    """The difference with its interval; with enough seeds also their number and the p-value."""
    interval = verdict.test.difference
    arms = "control arms" if max(verdict.controls) > 1 else "control arm"
    text = f"perplexity {percent(interval.mean)} against the {arms}"
    if interval.low is not None and interval.high is not None:
        text += f", 95 % interval [{percent(interval.low)}, {percent(interval.high)}]"
    if verdict.adjusted_p is None:
        return text
    look = f" (look {len(verdict.reads)})" if len(verdict.reads) > 1 else ""
    return f"{text}, {seeds_text(verdict.seeds)}{look}, {p_text(verdict.adjusted_p)}"


def reason(report: Report, verdict: Verdict) -> str:
    """One sentence on why the verdict is the one it is; "" where the verdict lacks seeds and says so."""
    name = verdict.variant
    if verdict.word == INTERIM:
        return (
            "the verdict follows at the planned number of seeds. Decisions on interim numbers are false in "
            "more than 5 % of studies."
        )
    if verdict.adjusted_p is None:
        return ""
    if report.tuned and report.design and name in report.tuned.unconfirmed:
        return unconfirmed(report.tuned, report.design, name)
    if verdict.word == EQUIVALENT:
        low, high = verdict.test.narrow.low or 0.0, verdict.test.narrow.high or 0.0
        return (
            f"its 90 % interval [{percent(low)}, {percent(high)}] lies within {size(verdict.margin)} on either side "
            "of zero."
        )
    if verdict.word == CANNOT_TELL:
        if verdict.test.difference.contains_zero:
            return "the interval contains zero, so chance can explain the difference."
        return (
            f"the interval excludes zero, but {verdict.judged_together} exploratory variants were tested, and chance "
            "alone makes one of them look different more often (Holm's correction)."
        )
    arms = report.controls_of(name)
    standard = f"the mean of {listed(arms)}" if len(arms) > 1 else arms[0]
    return (
        f"at each of {verdict.seeds} seeds {name} was compared with {contrast(name)} ({standard}). The difference is "
        f"larger than its variation from seed to seed can explain. {exaggeration_sentence(verdict)}"
    )


def unconfirmed(tuned: TunedVerdicts, design: Design, name: str) -> str:
    """Say why a difference at the best rates is no verdict: it does not hold at one rate."""
    word, common = tuned.unconfirmed[name], parse_arm(design.controls[0]).rate
    verdicts, where = (
        (tuned.same, f"{parse_arm(name).rate}, its own rate")
        if word == BETTER
        else (tuned.common, f"{common}, the rate of the control arms")
    )
    measured = next((numbers(one) for one in verdicts if one.variant == name), "not measured")
    return (
        f"it is {word} at its best rate than the control arms at theirs ({common}), but not where both have {where} "
        f"({measured}). The choice of the rates can explain the difference."
    )


def rate_sentences(report: Report) -> list[str]:
    """Where the rates come from, and the verdicts at one rate."""
    if report.tuned is None or report.design is None:
        return []
    choice, lines = report.choice, ["The learning rate of each arm was tuned on seeds that are not judged."]
    if choice:
        seeds = listed([str(seed) for seed in choice.seeds])
        lines = [
            f"Learning rates were tuned on other seeds ({seeds}; {report.design.choice}): {choice.text}."
        ]
    for one in report.tuned.common:
        if (twin := at_rate_of_controls(one.variant, report.design)) != one.variant:
            lines.append(f"Both at the rate of the control arms: {twin}: {finding(one)} ({numbers(one)}).")
    return lines + (edge_sentences(choice) if choice else [])


def exaggeration_sentence(verdict: Verdict) -> str:
    """By how much a difference that was called is likely to be too large; "" without such a verdict."""
    if not verdict.callable_from or verdict.exaggeration is None or verdict.exaggeration < 1.05:
        return ""
    return (
        f"The estimate may be too large: with {seeds_text(verdict.seeds)} and this spread, only differences above "
        f"{size(verdict.callable_from)} are called better or worse. If the true difference were half of the estimate, "
        f"studies that call it would report it {verdict.exaggeration:.1f} times as large on average."
    )


def next_step(report: Report) -> Text:
    """The next step: finish the runs, add seeds, or ask another question."""
    demo = report.study == DEMO and {run.variant for run in report.runs} == DEMO_ARMS
    make = Code("make demo") if demo else MAKE
    unstable = [run.name for run in report.runs if run.cause == DIVERGED]
    failed = [run.name for run in report.runs if run.status == "failed" and run.name not in unstable]
    runs = len(report.runs)
    if report.pending:
        verb = "is" if report.pending == 1 else "are"
        pending_runs = f"{report.pending} of {runs} runs {verb} pending"
        return (f"Next: {pending_runs}. If the study is stopped, continue it: ", make, ".")
    if failed:
        names = f"{len(failed)} of {runs} runs failed ({some(failed)})"
        return (f"Next: {names}; fix: retry with ", make, ".")
    if unstable:
        names = f"{len(unstable)} of {runs} runs diverged ({some(unstable)})"
        return f"Next: {names}; fix: a smaller CONFIG_LEARNING_RATE or less noise in another study."
    if demo:
        return ("Next: a study of your own: ", Code("make defconfig-gpt2-ra-ablation"), ", then ", MAKE, ".")
    edit = (" in .config (", MENUCONFIG, "), then ", MAKE, ". Finished runs are not repeated.")
    words = {verdict.word for verdict in report.verdicts}
    if INTERIM in words:
        planned = max(verdict.planned for verdict in report.verdicts if verdict.word == INTERIM)
        return (f"Next: finish the planned seeds; fix: set CONFIG_SEEDS={planned}", *edit)
    if any(verdict.adjusted_p is None for verdict in report.verdicts):
        return (f"Next: add seeds; fix: set CONFIG_SEEDS={VERDICT_SEEDS}", *edit)
    if CANNOT_TELL in words:
        seen = next(iter(report.sensitivities), None)
        goals = [f" ({seeds_needed(row)})" for row in seen.needed if row.percent == 1.0] if seen else []
        raised = f" (needed in all: {seeds_needed(seen.raised)})" if seen and seen.raised else ""
        return (
            f"Next: plan more seeds in a new study under another CONFIG_STUDY_NAME{''.join(goals)}. Raising "
            f"CONFIG_SEEDS in this one is another look at a stricter level{raised}: set it",
            *edit,
        )
    if report.verdicts:
        return (
            "Next: train a larger model or train longer under another CONFIG_STUDY_NAME. The result holds for this "
            "model, these data and this length of training."
        )
    return ""


def context(report: Report) -> list[str]:
    """The limits of the verdicts: the speed, the noise, runs that do not count."""
    lines = [
        *_continued(report),
        f"Perplexity is per {report.unit}; lower is better.",
        *rate_sentences(report),
        *design_sentences(report),
        *map(speed_sentence, report.speeds),
    ]
    lines += [one_class(group) for group in control_groups(report.variants) if len(group) > 1]
    if report.floor:
        lines.append(
            "A/A difference (control arms against each other): standard deviation at one seed "
            f"{report.floor.sigma:.2g} nats ({size(report.floor.sigma)} of perplexity), {dof_text(report.floor.dof)}. "
            "It estimates the seeds needed and checks the pipeline. No verdict uses it."
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
    return [*lines, *filter(None, [uncounted(report)])]


def _continued(report: Report) -> list[str]:
    """Name the shorter study that the runs continue, and its verdicts."""
    if report.continues is None:
        return []
    shorter = report.continues
    counts = listed(list(dict.fromkeys(f"{count:,}" for count in shorter.iterations.values())))
    verdicts = " ".join(shorter.verdicts) or "No verdict."
    return [
        f"The runs continue those of {shorter.study} ({counts} iterations), from the start of their decay. Verdicts of "
        f"that study when this one was planned: {verdicts}"
    ]


def design_sentences(report: Report) -> list[str]:
    """The planned comparison, what is exploratory, and what changed since the first run."""
    if not report.verdicts:
        return []
    looks = {verdict.reads for verdict in report.verdicts if len(verdict.reads) > 1}
    lines = _primary_sentences(report) + [
        f"There were looks at {listed([str(seeds) for seeds in reads])} seeds. The last look is tested "
        f"at {100 * nominal_levels(reads)[-1]:.2g} %, so that all looks together keep 5 %."
        for reads in sorted(looks)
    ]
    return lines + [
        f"At {seeds_text(one.looks[-1])} the verdict on {one.variant} was: {finding(one)} "
        f"({p_text(one.adjusted_p or 0.0)}). A later look does not withdraw it."
        for one in report.earlier
        if one.word not in NO_ANSWER
    ]


def _primary_sentences(report: Report) -> list[str]:
    """The primary comparison, and what changed since it was written."""
    design = report.design
    if design is None or not design.primary:
        unknown = " The planned seeds are not known, so repeated reading is not corrected for."
        return [
            "No primary comparison was written down before the first run, so every verdict is exploratory."
            + ("" if report.looks else unknown)
        ]
    others = " All others are exploratory." if len(report.verdicts) > 1 else ""
    seeds = seeds_text(len(design.seeds))
    lines = [
        f"Planned before the first run: {design.primary} is the primary comparison, at {seeds}, "
        f"margin {size(design.margin)} (SHA-256 {design.sha256[:12]}).{others}"
    ]
    if earlier := [f"{seeds}" for seeds in design.earlier_looks if seeds < len(design.seeds)]:
        lines.append(
            f"Older studies judged {design.primary} at {listed(earlier)} of these seeds, which counts as a look; fix: "
            "CONFIG_FIRST_SEED of seeds that no study has judged."
        )
    added = [name for name in report.looks if name not in design.arms]
    if added:
        lines.append(f"Added after the first run, so not planned: {listed(added)}.")
    if design.altered:
        lines.append(f"Warning: {ALTERED}.")
    return lines


def speed_sentence(speed: Speed) -> str:
    """The ratio of step times, and the estimated difference at equal time, without a verdict."""
    bounds = f" [{speed.low:.3f}, {speed.high:.3f}]" if speed.low and speed.high else ""
    times = f"{speed.ratio:.3f}{bounds} times as long as one of the baseline"
    line = f"Speed: one update of {speed.variant} takes {times}."
    if speed.at_equal_time:
        low, high = map(percent, speed.at_equal_time)
        line += (
            f" Estimate at equal time: {low} to {high} of perplexity; this range leaves out the variation over seeds; "
            "no verdict (docs/verdicts.md)."
        )
    return line
