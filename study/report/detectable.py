"""Sentences on the differences that a study can detect, and on the seeds that other differences need."""

from __future__ import annotations

import math

from referee.verdict.statistics import undetected_ratios
from study.analysis.equivalence import VarianceCheck
from study.analysis.sensitivity import SeedsNeeded, Sensitivity
from study.analysis.verdict import VERDICT_SEEDS
from study.report.build import Report
from study.report.sentences import dof_text, hours_text, p_text, seeds_text, size


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
