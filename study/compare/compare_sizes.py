"""The effect of each judged arm over compared studies of different model sizes, and its trend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ra.arms import parse_arm
from referee.pages.document import COPY, SORT, BulletList, Figure, Note, Section, Table
from referee.pages.figures import Plain, axis, figure, line
from referee.pages.markup import Text, escape_html
from study.analysis.size_trend import RULE, SizeTrend, trends
from study.arm_colors import color
from study.compare.loaded_studies import LoadedStudy
from study.report.figures_final import in_percent
from study.report.report_sentences import capped, difference
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
    prints = [study.used[0].record.fingerprint for study in studies]
    sizes = {row.parameters for row in rows}
    if len(sizes) < 2 or 0 in sizes or len({one.tokenizer for one in prints}) > 1:
        return None
    problems = [
        f"{row.study}: {row.counted} of {row.runs} runs are finished; fix: `make` continues"
        for row in rows
        if row.counted < row.runs
    ]
    differing = [name for name in SHARED if len({getattr(one, name) for one in prints}) > 1]
    if differing:
        problems.append(
            f"the studies differ in {', '.join(differing)}, so there is no trend; fix: run them with one defconfig "
            "command that changes CONFIG_STUDY_NAME and the model only"
        )
    by_size = [[] if differing else study.report.verdicts for _, study in pairs]
    return SizeComparison(rows, trends([row.parameters for row in rows], by_size), problems)


def _row(study: LoadedStudy) -> SizedStudy:
    controls = [run for run in study.used if parse_arm(run.variant).is_control]
    first = min(controls, key=lambda run: run.variant != BASELINE, default=None)
    return SizedStudy(
        study=study.label,
        parameters=first.record.parameters or 0 if first else 0,
        tokens=first.record.progress.tokens if first else 0,
        counted=len(study.used),
        runs=len(study.report.runs),
    )


SPREAD = 1.04  # factor between the marks of two arms at one size


def sizes_section(report: SizeComparison) -> Section:
    """The figure and the tables of studies of several sizes."""
    return Section(
        "Over model sizes",
        [
            trend_table(report),
            BulletList(report.problems),
            Note(f"{RULE} {capped(one.adjusted_p for one in report.trends)}"),
            Figure(
                "sizes",
                effects_figure(report),
                "Difference to the mean of the control arms with its 95 % interval.",
            ),
            Section("Effect at each size", [effects_table(report)], level=3),
        ],
    )


def trend_table(report: SizeComparison) -> Table:
    """The contrast of each arm."""
    columns: dict[str, Callable[[SizeTrend], Text]] = {
        "arm": lambda one: one.arm,
        "role": lambda one: one.role,
        "trend": lambda one: one.word,
        "change per tenfold parameters [95 %]": lambda one: (
            difference(one.contrast.slope) if one.contrast else "-"
        ),
        "dof": lambda one: f"{one.contrast.dof:.1f}" if one.contrast else "-",
        "p": lambda one: "-" if one.adjusted_p is None else f"{one.adjusted_p:.3f}",
    }
    return Table.of(report.trends, columns, (1, 2), tools=(SORT, COPY))


def effects_table(report: SizeComparison) -> Table:
    """A row for each arm and size."""
    cells = [
        [trend.arm, row.study, f"{row.parameters:,}", f"{row.flops:.1e}", str(effect.seeds) if effect else "0",
         difference(effect.test.difference) if effect else "-", effect.word if effect else "-"]
        for trend in report.trends
        for row, effect in zip(report.rows, trend.effects, strict=True)
    ]  # fmt: skip
    headings = ["arm", "study", "parameters", "FLOPs", "seeds", "difference [95 %]", "verdict"]
    return Table(headings, cells, (1, 6), tools=(SORT, COPY))


def effects_figure(report: SizeComparison) -> Plain | None:
    """Differences in percent of perplexity over parameters on a logarithmic axis, with their intervals."""
    arms = [one.arm for one in report.trends]
    data = []
    for place, trend in enumerate(report.trends):
        shift = SPREAD ** (place - (len(arms) - 1) / 2)
        known = [(row, effect) for row, effect in zip(report.rows, trend.effects, strict=True) if effect]
        estimates = [in_percent(effect.test.difference) for _, effect in known]
        ink = color(trend.arm, arms)
        bars: Plain = {"type": "data", "symmetric": False, "thickness": 2, "width": 5, "color": ink}
        bars["array"] = [None if high is None else high - middle for middle, _, high in estimates]
        bars["arrayminus"] = [None if low is None else middle - low for middle, low, _ in estimates]
        data.append(
            line(
                trend.arm,
                ink,
                group=trend.arm,
                width=1.5,
                dash="dot",
                x=[row.parameters * shift for row, _ in known],
                y=[middle for middle, _, _ in estimates],
                marker={"color": ink, "size": 9},
                error_y=bars,
                text=[f"{escape_html(row.study)}: {effect.word}" for row, effect in known],
                hovertemplate="%{text}<br>%{y:+.3f} %<extra>" + escape_html(trend.arm) + "</extra>",
            )
        )
    if not data:
        return None
    ticks = {
        "tickvals": [row.parameters for row in report.rows],
        "ticktext": [f"{escape_html(row.study)}<br>{row.parameters / 1e6:.3g} M" for row in report.rows],
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
