"""The effect of each judged arm over compared studies of different model sizes, and its trend. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ra.names import is_control_arm
from referee.pages.document import (
    COPY,
    HTML,
    MARKDOWN,
    SORT,
    BulletList,
    Figure,
    Finding,
    Findings,
    Only,
    Paragraph,
    Section,
    Table,
)
from referee.pages.markup import Strong, Text, escape_html
from referee.pages.plots import Plain, axis, figure, trace
from referee.verdict.statistics import perplexity_percent
from study.analysis.size_trend import GROWS, HOLDS, RULE, SizeTrend, trends
from study.analysis.verdict import NO_ANSWER, Verdict
from study.arm_colors import color, color_label
from study.compare.loaded_studies import LoadedStudy
from study.report.report_sentences import capped, difference, p_text
from study.runs import BASELINE

SHARED = ("data", "validation", "batch", "numbers")  # of the fingerprint, at all sizes


@dataclass(frozen=True)
class SizedStudy:
    """The study of one size."""

    study: str
    parameters: int  # of the baseline, or of another control arm; 0 without one
    tokens: int  # of a run
    counted: int  # finished runs that count
    runs: int  # planned runs

    @property
    def flops(self) -> float:
        """Training FLOPs of a run: 6 x parameters x tokens (Kaplan et al. 2020, arXiv:2001.08361)."""
        return 6.0 * self.parameters * self.tokens


@dataclass(frozen=True)
class SizeComparison:
    """Rows and trends, the smallest model first."""

    rows: list[SizedStudy]
    trends: list[SizeTrend]
    problems: list[str]  # why there is no trend, or what a reader must know


def compare_sizes(studies: Sequence[LoadedStudy]) -> SizeComparison | None:
    """Judge the trend over studies with finished runs; None where sizes are equal or unknown.

    The tokenizer changes the number of parameters, so sizes of several tokenizers are unknown.
    """
    pairs = sorted(((_row(study), study) for study in studies), key=lambda pair: pair[0].parameters)
    rows = [row for row, _ in pairs]
    tokenizers = {study.used[0].record.fingerprint.tokenizer for study in studies}
    if len({row.parameters for row in rows}) < 2 or not rows[0].parameters or len(tokenizers) > 1:
        return None
    different = _different(studies)
    by_size = [[] if different else study.report.verdicts for _, study in pairs]
    return SizeComparison(
        rows=rows,
        trends=trends([row.parameters for row in rows], by_size),
        problems=[*_unfinished(rows), *different],
    )


def _row(study: LoadedStudy) -> SizedStudy:
    controls = [run for run in study.used if is_control_arm(run.variant)]
    first = min(controls, key=lambda run: run.variant != BASELINE, default=None)
    return SizedStudy(
        study=study.label,
        parameters=first.record.parameters or 0 if first else 0,
        tokens=first.record.progress.tokens if first else 0,
        counted=len(study.used),
        runs=len(study.report.runs),
    )


def _unfinished(rows: Sequence[SizedStudy]) -> list[str]:
    return [
        f"{row.study}: {row.counted} of {row.runs} runs are finished; fix: `make` continues"
        for row in rows
        if row.counted < row.runs
    ]


def _different(studies: Sequence[LoadedStudy]) -> list[str]:
    """Name the entries of the fingerprint that differ among the sizes."""
    prints = [study.used[0].record.fingerprint for study in studies]
    differing = [name for name in SHARED if len({getattr(one, name) for one in prints}) > 1]
    if not differing:
        return []
    return [
        f"The studies differ in {', '.join(differing)}, so their effects are not compared; fix: run them with one "
        "defconfig command that changes CONFIG_STUDY_NAME and the model only"
    ]


def as_json(report: SizeComparison) -> dict[str, Any]:
    """Return the report as plain data."""
    value = dataclasses.asdict(report)
    for row, source in zip(value["rows"], report.rows, strict=True):
        row["flops"] = source.flops
    return value


SPREAD = 1.04  # factor between the marks of two arms at one size
METHOD = (
    "The contrast is the least-squares slope of the mean differences over log parameters. Each size has its own "
    "variance over seeds, and the degrees of freedom are those of Welch and Satterthwaite.",
    "Toward zero and away from it are meant as seen from the mean of the differences over the sizes.",
    "The test of the primary arm needs no correction for other arms; exploratory arms share 5 % by Holm's method.",
    "That no change is found is not a proof that there is none: the interval shows which changes remain possible.",
    "Text, tokenizer, validation and batches agree. The checklist names other settings that differ.",
    "Under a budget of time a larger model makes fewer updates, so the sizes differ in tokens as well.",
    "FLOPs: 6 x parameters x tokens (Kaplan et al. 2020, arXiv:2001.08361), of the baseline.",
)


def sizes_section(report: SizeComparison) -> Section:
    """The words, the figure and the tables of studies of several sizes."""
    arms = [one.arm for one in report.trends]
    nothing = "" if arms else "No effect is shown: no judged arm has a finished seed and a control arm."
    return Section(
        "Over model sizes",
        [
            Findings([_finding(one, report, arms) for one in report.trends]),
            Paragraph(nothing),
            BulletList(report.problems),
            Figure(
                "sizes",
                effects_figure(report),
                "Difference to the mean of the control arms with its 95 % interval.",
            ),
            Section("Effect at each size", [effects_table(report)], level=3),
            Section(
                "Trend",
                [trend_table(report), Paragraph(f"{RULE} {capped(one.adjusted_p for one in report.trends)}")],
                level=3,
            ),
            Section("Studies by size", [studies_table(report)], level=3),
            Only((HTML, MARKDOWN), [Section("Method of the trend", [BulletList(METHOD)], level=3)]),
        ],
    )


def _finding(trend: SizeTrend, report: SizeComparison, arms: Sequence[str]) -> Finding:
    last = trend.effects[-1]
    kind = last.word if last and trend.word in (HOLDS, GROWS) and last.word not in NO_ANSWER else "unsure"
    reason = _reason(trend, report)
    sentence: Text = (Strong(trend.arm), f" ({trend.role}): {trend.word}. {reason}")
    return Finding(color_label(trend.arm, arms), kind, f"{trend.role}: {trend.word}", reason, sentence)


def _reason(trend: SizeTrend, report: SizeComparison) -> str:
    """The word at each size, and the change per tenfold parameters."""
    words = ", ".join(
        f"{_word(effect)} in {row.study}" for effect, row in zip(trend.effects, report.rows, strict=True)
    )
    if trend.contrast is None or trend.adjusted_p is None:
        return f"{words[:1].upper()}{words[1:]}; a trend needs three finished seeds at every size."
    return (
        f"{words[:1].upper()}{words[1:]}; the difference changes by {difference(trend.contrast.slope)} per tenfold "
        f"parameters, {p_text(trend.adjusted_p)}."
    )


def _word(effect: Verdict | None) -> str:
    return effect.word if effect else "no difference known"


def effects_table(report: SizeComparison) -> Table:
    """A row for each arm and size."""
    cells = [
        [trend.arm, row.study, f"{row.parameters:,}", f"{row.flops:.1e}", str(effect.seeds) if effect else "0",
         difference(effect.test.difference) if effect else "-", _word(effect)]
        for trend in report.trends
        for row, effect in zip(report.rows, trend.effects, strict=True)
    ]  # fmt: skip
    headings = ["arm", "study", "parameters", "FLOPs", "seeds", "difference [95 %]", "verdict"]
    return Table(headings, cells, (1, 6), tools=(SORT, COPY))


def trend_table(report: SizeComparison) -> Table:
    """The contrast of each arm."""
    cells = []
    for one in report.trends:
        found = one.contrast
        numbers = ["-", "-", "-"]
        if found and one.adjusted_p is not None:
            numbers = [
                difference(found.slope),
                f"{found.dof:.1f}",
                p_text(one.adjusted_p).removeprefix("p ").removeprefix("= "),
            ]
        cells.append([one.arm, one.role, *numbers, one.word])
    headings = ["arm", "role", "change per tenfold parameters [95 %]", "dof", "p", "trend"]
    return Table(headings, cells, (1, 5), tools=(SORT, COPY))


def studies_table(report: SizeComparison) -> Table:
    """Runs, parameters and cost of each study."""
    columns = {
        "study": lambda row: row.study,
        "runs": lambda row: f"{row.counted} of {row.runs}",
        "parameters": lambda row: f"{row.parameters:,}",
        "tokens a run": lambda row: f"{row.tokens:,}",
        "FLOPs a run": lambda row: f"{row.flops:.1e}",
    }
    return Table.of(report.rows, columns)


def effects_figure(report: SizeComparison) -> Plain | None:
    """Differences in percent of perplexity over parameters on a logarithmic axis, with their intervals."""
    arms = [one.arm for one in report.trends]
    data = []
    for place, trend in enumerate(report.trends):
        shift = SPREAD ** (place - (len(arms) - 1) / 2)
        known = [(row, effect) for row, effect in zip(report.rows, trend.effects, strict=True) if effect]
        if not known:
            continue
        middle = [perplexity_percent(effect.test.difference.mean) for _, effect in known]
        low, high = ([_end(effect, end) for _, effect in known] for end in ("low", "high"))
        bars: Plain = {"type": "data", "symmetric": False, "thickness": 2, "width": 5}
        bars["array"] = [None if end is None else end - at for end, at in zip(high, middle, strict=True)]
        bars["arrayminus"] = [None if end is None else at - end for end, at in zip(low, middle, strict=True)]
        ink = color(trend.arm, arms)
        data.append(
            trace(
                trend.arm,
                group=trend.arm,
                mode="lines+markers",
                x=[row.parameters * shift for row, _ in known],
                y=middle,
                line={"color": ink, "width": 1.5, "dash": "dot"},
                marker={"color": ink, "size": 9},
                error_y=bars | {"color": ink},
                text=[f"{escape_html(row.study)}: {effect.word}" for row, effect in known],
                hovertemplate="%{text}<br>%{y:+.3f} %<extra>" + escape_html(trend.arm) + "</extra>",
            )
        )
    if not data:
        return None
    ticks = {
        "tickvals": [row.parameters for row in report.rows],
        "ticktext": [f"{escape_html(row.study)}<br>{_short(row.parameters)}" for row in report.rows],
    }
    return figure(
        data,
        340,
        (70, 24, 16, 64),
        {"margin": {"l": 56, "r": 12}, "font": {"size": 11}},
        xaxis=axis("parameters (log)", type="log", **ticks),
        yaxis=axis("% of perplexity (lower is better)", zeroline=True, rangemode="tozero"),
        showlegend=len(arms) > 1,
    )


def _end(effect: Verdict, end: str) -> float | None:
    value = getattr(effect.test.difference, end)
    return None if value is None else perplexity_percent(value)


def _short(count: int) -> str:
    return f"{count / 1e6:.3g} M" if count < 1e9 else f"{count / 1e9:.3g} B"
