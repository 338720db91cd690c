"""Put a comparison into sentences."""

from __future__ import annotations

from pages.markup import Code, Strong, Text, join
from ra.names import one_class
from study.analysis.verdict import BETTER, CANNOT_TELL, VERDICT_SEEDS, WORSE
from study.compare.alignment import TOLERANCE, Alignment, Errors
from study.compare.build import StudyComparison
from study.compare.checklist import EQUAL, FATAL, HARMLESS, NOT_RECORDED, blocking
from study.compare.load import LoadedStudy
from study.compare.ranking import AGREE, CONTRADICT, NONE, Ranking, ordered
from study.records.runs import BASELINE
from study.report.sentences import ONE_SEED, dof_text, percent, seeds_text, uncounted
from study.report.summary import at_equal_time, finding, numbers


def sentences(comparison: StudyComparison) -> list[Text]:
    """Return the main results, the most important first."""
    studies = comparison.studies
    controls = {row.variant for study in studies for row in study.report.rows if row.control}
    return [
        comparability(comparison),
        *agreements(comparison),
        *(line for study in studies for line in _seeds(study)),
        *([one_class(ordered(controls))] if len(controls) > 1 else []),
        *(line for study in studies for line in _cut(study)),
        *alignment_summary(comparison),
        *(f"{study.label}: {line}" for study in studies if (line := uncounted(study.report.runs))),
    ]


def comparability(comparison: StudyComparison) -> Text:
    """Say whether losses of different studies can be compared, and why."""
    listed = "; ".join(reason.rstrip(". ") for reason in comparison.reasons)
    if not comparison.checks:
        return f"There is nothing to compare: {listed}."
    if comparison.absolute:
        excluded = [
            f" {check.excludes} is excluded: {check.reason}." for check in comparison.checks if check.excludes
        ]
        return (
            Strong("Comparable."),
            " Data, model, batch, schedule, settings and code agree wherever they change a loss, so losses can be "
            "compared at equal tokens.",
            *excluded,
        )
    return (
        Strong("Not comparable."),
        f" Losses of these studies must not be compared with each other: {listed}. Each study's variants are compared "
        f"with its own {BASELINE} instead.",
    )


def table_introduction(comparison: StudyComparison) -> str:
    """Describe the main table."""
    if comparison.absolute:
        return (
            "Mean perplexity over the shared seeds, with its 95 % interval, at the last token count at which all "
            "shared runs of a variant were evaluated. Lower is better. Changes are paired by seed; each has its own "
            "95 % interval."
        )
    blocks = blocking(comparison.checks)
    differing = [f"{check.subject}{check.evidence}" for check in blocks if check.status == FATAL]
    unknown = [check.subject for check in blocks if check.status != FATAL]
    differing += [f"{NOT_RECORDED}: {', '.join(unknown)}"] if unknown else []
    because = "; ".join(differing or comparison.reasons)
    return (
        f"Losses must not be compared between these studies because of {because}. The table compares"
        f" each study's variants with its own {BASELINE}, paired by seed, in percent of perplexity. Lower is "
        "better. If the studies are different experiments, true effects may differ too."
    )


def _seeds(study: LoadedStudy) -> list[Text]:
    """Report too few seeds for a verdict, and the fix."""
    rows = study.report.rows
    seeds = max((len(row.seeds) for row in rows), default=VERDICT_SEEDS)
    if seeds >= VERDICT_SEEDS:
        return []
    if seeds == 1 and all(row.control for row in rows):
        return [(Strong(study.label), f": {ONE_SEED}.")]
    missing = f": {seeds_text(seeds)}; a verdict needs {VERDICT_SEEDS}; fix: "
    return [
        (Strong(study.label), missing, Code(f"CONFIG_SEEDS={VERDICT_SEEDS}"), ", then ", Code("make"), ".")
    ]


def _cut(study: LoadedStudy) -> list[Text]:
    """Report runs that ended before their schedule."""
    names = [member.run.name for member in study.members if member.record.truncated]
    if not names:
        return []
    meaning = (
        "Their final losses are excluded from every difference, order and verdict."
        if study.report.cut
        else "Differences may come from the length of training alone."
    )
    count = f"{len(names)} of {len(study.members)} runs"
    return [(Strong(study.label), f": the schedule was cut in {count}: {', '.join(names)}. {meaning}")]


def agreements(comparison: StudyComparison) -> list[Text]:
    """Report the verdicts of the studies on each real change, and whether they agree."""
    found: dict[str, list[tuple[str, str]]] = {}  # variant -> (verdict, text) of each study
    for study in comparison.studies:
        for verdict in study.report.verdicts:
            when = at_equal_time(study.report, verdict.variant)
            detail = ", ".join(filter(None, [percent(verdict.test.difference.mean), when]))
            text = f"{study.label}: {verdict.word} ({detail})"
            found.setdefault(verdict.variant, []).append((verdict.word, text))
    return [
        (
            Strong(name),
            f" against its study's control arms: {'; '.join(text for _, text in verdicts)}; "
            f"{_agreement([word for word, _ in verdicts])}.",
        )
        for name, verdicts in sorted(found.items())
    ]


def _agreement(words: list[str]) -> str:
    """Say whether verdicts agree."""
    distinct = set(words)
    if len(words) < 2:
        return "only one study has this variant"
    if distinct == {CANNOT_TELL}:
        return "no study can tell"
    if len(distinct) == 1:
        return "they agree"
    if {BETTER, WORSE} <= distinct:
        return "they contradict each other"
    if CANNOT_TELL in distinct:
        return "not every study can tell, which is no contradiction"
    return "equivalent within a margin and better or worse are no contradiction"


def error(value: float) -> str:
    """Format a relative error in percent."""
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def alignment_summary(comparison: StudyComparison) -> list[str]:
    """Compare training losses of each pair of studies with the tolerance and with the A/A envelope."""
    lines = []
    first = comparison.studies[0].label
    for other in comparison.studies[1:]:
        pair = [line for line in comparison.alignments if line.studies == (first, other.label)]
        names = f"{first} and {other.label}"
        if not pair:
            if comparison.checks:
                lines.append(f"Training losses of {names}: no run has a curve in both studies.")
            continue
        within = sum(line.within_tolerance for line in pair)
        worst = Errors.largest(line.errors for line in pair)
        lines.append(
            f"Training losses of {names} at equal iterations: {within} of {len(pair)} runs agree within "
            f"{error(TOLERANCE)} (largest error: first step {error(worst.first)}, first tenth {error(worst.early)}, "
            f"last tenth {error(worst.late)}). {_envelope(pair)}"
        )
    experiments_differ = any(check.status == FATAL and check.group != "study" for check in comparison.checks)
    if experiments_differ and not all(line.within_tolerance for line in comparison.alignments):
        lines.append("Curves of different experiments are expected to separate.")
    return lines


def _envelope(pair: list[Alignment]) -> str:
    known = [line.within_envelope for line in pair if line.within_envelope is not None]
    if not known:
        return "No seed has two control arms, so there is no A/A envelope."
    return (
        f"{sum(known)} of {len(known)} differ by no more than control arms of one study do, at the first step and "
        "over both tenths."
    )


def ranking_note(ranking: Ranking) -> Text:
    """Describe how certain the places of one study are. Without places, give its verdicts."""
    floor = ranking.floor
    noise = (
        f"noise floor {floor.sigma:.2g} nats ({percent(floor.sigma).lstrip('+')} of perplexity, "
        f"{dof_text(floor.dof)})"
        if floor
        else "no noise floor"
    )
    parts = [ranking.why_not or f"{len(ranking.seeds)} seeds", noise]
    if ranking.cut:
        parts.append(f"excluded because their schedule was cut: {', '.join(ranking.cut)}")
    if ranking.left_out and not ranking.why_not:
        parts.append(f"excluded because they lack these seeds: {', '.join(ranking.left_out)}")
    verdicts: list[Text] = [
        (Strong(verdict.variant), f": {finding(verdict)} ({numbers(verdict)}).")
        for verdict in (ranking.verdicts if ranking.why_not else [])
    ]
    return join(" ", [f"{ranking.study}: {'; '.join(parts)}.", *verdicts])


def order_note(comparison: StudyComparison) -> str:
    """Say whether the studies put their shared variants in one order."""
    without = [f"{one.study} ({one.why_not})" for one in comparison.rankings if one.why_not]
    if len(comparison.rankings) - len(without) < 2:
        return f"There are no orders to compare: {', '.join(without)}."
    found = {row.agreement for row in comparison.across}
    if not found:
        text = "The orders cannot be compared: the studies share no variant."
    elif CONTRADICT in found:
        names = ", ".join(row.variant for row in comparison.across if row.agreement == CONTRADICT)
        text = f"The orders contradict each other beyond noise: {names}."
    elif found == {AGREE}:
        text = "The orders agree."
    elif found == {NONE}:
        text = "The orders neither agree nor contradict each other: no study finds a difference among the variants."
    else:
        text = "The orders do not contradict each other, but some studies cannot place every variant."
    return f"{text} Without an order: {', '.join(without)}." if without else text


def counts(comparison: StudyComparison) -> str:
    """Count the checklist entries by status."""
    kinds = [check.status for check in comparison.checks]
    return ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in (FATAL, NOT_RECORDED, HARMLESS, EQUAL) if kind in kinds
    )
