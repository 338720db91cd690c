"""Put a comparison into sentences."""

from __future__ import annotations

from ra.names import one_class
from referee.numerics.setup.checklist_rows import FATAL
from referee.pages.markup import Code, Strong, Text
from referee.verdict.statistics import percent
from study.analysis.verdict import BETTER, NO_ANSWER, VERDICT_SEEDS, WORSE
from study.compare.alignment import TOLERANCE, Alignment, Errors
from study.compare.compared_studies import StudyComparison
from study.compare.loaded_studies import LoadedStudy
from study.compare.ranking import AGREE, CONTRADICT, NONE, Ranking
from study.report.report_sentences import ONE_SEED, seeds_text, uncounted
from study.report.report_summary import at_equal_time, exaggeration_sentence
from study.runs import variant_order


def sentences(comparison: StudyComparison) -> list[Text]:
    """Return the main results, the most important first."""
    studies = comparison.studies
    controls = {row.variant for study in studies for row in study.report.rows if row.control}
    return [
        comparability(comparison),
        *(f"{study.label}: {line}" for study in studies for line in study.report.damaged),
        *agreements(comparison),
        *(line for study in studies for line in _seeds(study)),
        *([one_class(sorted(controls, key=variant_order))] if len(controls) > 1 else []),
        *(line for study in studies for line in _cut(study)),
        *alignment_summary(comparison),
        *(f"{study.label}: {line}" for study in studies if (line := uncounted(study.report))),
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
        f" Losses must not be compared between these studies: {listed}. Each study's variants are compared with its "
        "own control arms instead.",
    )


def table_introduction(comparison: StudyComparison) -> str:
    """Describe the main table."""
    if comparison.absolute:
        return (
            "Mean perplexity over the shared seeds, with its 95 % interval, at the last token count at which all "
            "shared runs of a variant were evaluated. Lower is better. Changes are paired by seed; each has its own "
            "95 % interval."
        )
    return (
        "Each study's variants against its own control arms, paired by seed, in percent of perplexity. Lower is "
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
    fix = (Code(f"CONFIG_SEEDS={VERDICT_SEEDS}"), ", then ", Code("make"), ".")
    return [(Strong(study.label), missing, *fix)]


def _cut(study: LoadedStudy) -> list[Text]:
    """Report runs that ended before their schedule."""
    names = [run.name for run in study.report.used if run.record.truncated]
    if not names:
        return []
    meaning = (
        "Their final losses are excluded from every difference, order and verdict."
        if study.report.cut
        else "Differences may come from the length of training alone."
    )
    count = f"{len(names)} of {len(study.report.used)} runs"
    return [(Strong(study.label), f": the schedule was cut in {count}: {', '.join(names)}. {meaning}")]


def agreements(comparison: StudyComparison) -> list[Text]:
    """Report the verdicts of the studies on each real change, and whether they agree."""
    words: dict[str, list[str]] = {}  # variant -> the verdict of each study
    texts: dict[str, list[str]] = {}
    for study in comparison.studies:
        for verdict in study.report.verdicts:
            when = at_equal_time(study.report, verdict.variant)
            detail = ", ".join(filter(None, [verdict.role, percent(verdict.test.difference.mean), when]))
            note = f". {exaggeration_sentence(verdict)}".rstrip(". ")
            words.setdefault(verdict.variant, []).append(verdict.word)
            texts.setdefault(verdict.variant, []).append(f"{study.label}: {verdict.word} ({detail}){note}")
    return [
        (
            Strong(name),
            f" against its study's control arms: {'; '.join(texts[name])}; {_agreement(words[name])}.",
        )
        for name in sorted(words)
    ]


def _agreement(words: list[str]) -> str:
    """Say whether verdicts agree."""
    distinct = set(words)
    if len(words) < 2:
        return "only one study has this variant"
    if distinct <= set(NO_ANSWER):
        return "no study can tell"
    if len(distinct) == 1:
        return "they agree"
    if {BETTER, WORSE} <= distinct:
        return "they contradict each other"
    if distinct & set(NO_ANSWER):
        return "not every study can tell, which is no contradiction"
    return "equivalent within a margin and better or worse are no contradiction"


def error(value: float) -> str:
    """Format a relative error in percent."""
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def alignment_summary(comparison: StudyComparison) -> list[str]:
    """Compare training losses of each pair of studies with the tolerance and with the A/A envelope."""
    if not comparison.checks:
        return []
    lines = []
    for names, pair in comparison.pairs().items():
        if not pair:
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
    within = f"{sum(known)} of {len(known)} differ by no more than control arms of one study do"
    return f"{within}, at the first step and over both tenths."


def ranking_note(ranking: Ranking) -> str:
    """Name the variants that one study's order leaves out; "" without one."""
    if ranking.why_not or not ranking.left_out:
        return ""
    left_out = ", ".join(ranking.left_out)
    return f"{ranking.study}: {len(ranking.seeds)} seeds; excluded because they lack these seeds: {left_out}."


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
