"""The sentences of a comparison: what may be said, what may not, and why."""

from __future__ import annotations

from pages.markup import Strong, Text, join
from ra.names import one_class
from study.analysis.verdict import BETTER, CANNOT_TELL, VERDICT_SEEDS, WORSE, Verdict
from study.compare.alignment import RULE, Alignment, Errors
from study.compare.build import StudyComparison
from study.compare.checklist import EQUAL, FATAL, HARMLESS, NOT_RECORDED, blocking
from study.compare.load import LoadedStudy
from study.compare.ranking import AGREE, CONTRADICT, NONE, Ranking, ordered
from study.records.runs import BASELINE
from study.report.sentences import (
    ONE_SEED,
    dof_text,
    percent,
    seeds_text,
    why_uncounted,
)
from study.report.summary import at_equal_time, finding, numbers


def sentences(comparison: StudyComparison) -> list[Text]:
    """What a reader takes away, the most important first."""
    lines: list[Text] = [allowed(comparison)]
    lines += [line for study in comparison.studies for line in _seeds(study)]
    controls = {row.variant for study in comparison.studies for row in study.report.rows if row.control}
    if len(controls) > 1:
        lines.append(one_class(ordered(controls)))
    lines += [line for study in comparison.studies for line in _cut(study)]
    lines += agreements(comparison)
    lines += alignment_summary(comparison)
    lines += [line for study in comparison.studies for line in _uncounted(study)]
    return lines


def allowed(comparison: StudyComparison) -> str:
    """Whether losses of the studies may be set side by side."""
    if comparison.absolute:
        return "Losses may be compared as they are, at equal tokens: nothing on the checklist forbids it."
    listed = "; ".join(reason.rstrip(". ") for reason in comparison.reasons)
    if not comparison.checks:
        return f"There is nothing to compare: {listed}."
    return f"Losses of these studies must not be compared with each other: {listed}."


def above_table(comparison: StudyComparison) -> str:
    """What the main table shows."""
    if comparison.absolute:
        return (
            "Perplexity at the last tokens at which all shared runs of a variant were evaluated, mean over the shared "
            "seeds [95 % interval]. The change is paired by seed, its intervals are one by one, and lower is better."
        )
    return (
        f"Losses must not be compared between these studies ({_named(comparison)}). Instead, each study's variants "
        f"against its own {BASELINE}, paired by seed, in percent of perplexity; lower is better. Where the studies ran "
        "other experiments, even true effects may differ."
    )


def _named(comparison: StudyComparison) -> str:
    """The reasons in short: differing entries with their values, unrecorded ones by name."""
    blocks = blocking(comparison.checks)
    differing = [f"{check.subject} {' | '.join(check.values)}" for check in blocks if check.status == FATAL]
    unknown = [check.subject for check in blocks if check.status != FATAL]
    if unknown:
        differing.append(f"{NOT_RECORDED}: {', '.join(unknown)}")
    return "; ".join(differing or comparison.reasons)


def _seeds(study: LoadedStudy) -> list[Text]:
    """Say where a study has fewer seeds than a verdict needs."""
    rows = study.report.rows
    seeds = max((len(row.seeds) for row in rows), default=VERDICT_SEEDS)
    if seeds >= VERDICT_SEEDS:
        return []
    if seeds == 1 and all(row.control for row in rows):
        return [(Strong(study.label), f": {ONE_SEED}.")]
    return [(Strong(study.label), f": {seeds_text(seeds)}; a verdict needs {VERDICT_SEEDS}.")]


def _cut(study: LoadedStudy) -> list[Text]:
    """Runs that were cut short."""
    names = [member.run.name for member in study.members if member.record.truncated]
    if not names:
        return []
    meaning = (
        "They ended before the others, so their final losses count in no difference, no order and no verdict."
        if study.report.cut
        else "What sets them apart may be the length of training alone."
    )
    return [
        (
            Strong(study.label),
            f": the schedule was cut in {len(names)} of {len(study.members)} runs: {', '.join(names)}. {meaning}",
        )
    ]


def agreements(comparison: StudyComparison) -> list[Text]:
    """The verdicts of the studies on each real change, and whether they agree."""
    lines: list[Text] = []
    for name in sorted(
        {verdict.variant for study in comparison.studies for verdict in study.report.verdicts}
    ):
        said = {}
        for study in comparison.studies:
            for verdict in study.report.verdicts:
                if verdict.variant == name:
                    word = verdict.word
                    when = at_equal_time(study.report, name)
                    more = f", {when}" if when else ""
                    said[study.label] = f"{word} ({percent(verdict.test.difference.mean)}{more})", word
        listed = "; ".join(f"{label}: {text}" for label, (text, _) in said.items())
        words = {word for _, word in said.values()}
        if len(said) < 2:
            together = "it is judged in one study only"
        elif words == {CANNOT_TELL}:
            together = "no study can tell"
        elif len(words) == 1:
            together = "they agree"
        elif {BETTER, WORSE} <= words:
            together = "they contradict each other"
        elif CANNOT_TELL in words:
            together = "not every study can tell, which is no contradiction"
        else:
            together = "equivalent within a margin and better or worse are no contradiction"
        lines.append((Strong(name), f" against its study's control arms: {listed}; {together}."))
    return lines


def error(value: float) -> str:
    """A relative error in percent, in as many digits as anyone reads."""
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def alignment_summary(comparison: StudyComparison) -> list[str]:
    """Two sentences a pair of studies: the one-percent rule, and the A/A envelope."""
    lines = []
    first = comparison.studies[0].label
    for other in comparison.studies[1:]:
        pair = [line for line in comparison.alignments if line.studies == (first, other.label)]
        names = f"{first} and {other.label}"
        if not pair:
            if comparison.checks:
                lines.append(f"Training losses of {names}: no run has a curve in both studies.")
            continue
        within = sum(line.within_rule for line in pair)
        worst = Errors(
            *(max(getattr(line.errors, part) for line in pair) for part in ("first", "early", "late"))
        )
        lines.append(
            f"Training losses of {names} at equal iterations: {within} of {len(pair)} runs agree within {error(RULE)} "
            f"(largest error: first step {error(worst.first)}, first tenth {error(worst.early)}, last tenth "
            f"{error(worst.late)}).{_envelope(pair)}"
        )
        if any(check.status == FATAL and check.group != "study" for check in comparison.checks):
            lines.append("Where the studies ran other experiments, their curves are expected to part.")
    return lines


def _envelope(pair: list[Alignment]) -> str:
    known = [line.within_envelope for line in pair if line.within_envelope is not None]
    if not known:
        return " No seed has two control arms, so there is no A/A envelope."
    return (
        f" {sum(known)} of {len(known)} differ by no more than control arms of one study do, at the first step and "
        "over both tenths."
    )


def _uncounted(study: LoadedStudy) -> list[str]:
    runs = [run for run in study.report.runs if not run.used]
    listed = ", ".join(f"{run.name} ({why_uncounted(run)})" for run in runs)
    if not runs:
        return []
    return [f"{study.label}: {len(runs)} of {len(study.report.runs)} runs are not counted: {listed}."]


def short_verdict(verdict: Verdict) -> Text:
    """The verdict of one study on a real change, with its numbers."""
    return (Strong(verdict.variant), f": {finding(verdict)} ({numbers(verdict)}).")


def ranking_note(ranking: Ranking) -> Text:
    """How sure the places of one study are; for one seed, which has none, its verdicts."""
    floor = ranking.floor
    noise = (
        f"noise floor {floor.sigma:.2g} nats ({percent(floor.sigma).lstrip('+')} of perplexity, "
        f"{dof_text(floor.dof)})"
        if floor
        else "no noise floor"
    )
    parts = [ranking.why_not or f"{len(ranking.seeds)} seeds", noise]
    if not ranking.same_tokens:
        parts.append("its control arms ended at different tokens, so their spread is not noise alone")
    if ranking.cut:
        parts.append(f"left out since their schedule was cut short: {', '.join(ranking.cut)}")
    if ranking.left_out and not ranking.why_not:
        parts.append(f"left out for want of these seeds: {', '.join(ranking.left_out)}")
    verdicts = [short_verdict(verdict) for verdict in ranking.verdicts] if ranking.why_not else []
    return join(" ", [f"{ranking.study}: {'; '.join(parts)}.", *verdicts])


def order_note(comparison: StudyComparison) -> str:
    """Whether the studies put the variants that all of them have in one order."""
    without = [f"{one.study} ({one.why_not})" for one in comparison.rankings if one.why_not]
    if len(comparison.rankings) - len(without) < 2:
        return f"There are no orders to compare: {', '.join(without)}."
    said = {row.agreement for row in comparison.across}
    if not said:
        found = "The orders cannot be compared: no variant is in all of them."
    elif CONTRADICT in said:
        names = ", ".join(row.variant for row in comparison.across if row.agreement == CONTRADICT)
        found = f"The orders contradict each other beyond noise: {names}."
    elif said == {AGREE}:
        found = "The orders agree."
    elif said <= {NONE}:
        found = "The orders neither agree nor contradict each other: no study finds a difference among the variants."
    else:
        found = "The orders do not contradict each other, but not every study can tell each variant's place."
    return f"{found} Without an order: {', '.join(without)}." if without else found


def counts(comparison: StudyComparison) -> str:
    """How many rows of the checklist are of each kind."""
    kinds = [check.status for check in comparison.checks]
    return ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in (FATAL, NOT_RECORDED, HARMLESS, EQUAL) if kind in kinds
    )
