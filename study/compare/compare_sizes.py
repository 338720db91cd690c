"""The effect of each judged arm over compared studies of different model sizes, and its trend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ra.arms import parse_arm
from referee.pages.document import BulletList, Figure, Note, Section, Table
from referee.pages.figures import Plain
from referee.pages.markup import Text
from referee.verdict.looks import adjusted_for_looks
from referee.verdict.statistics import Interval, holm, mean, t_quantile, t_tail
from study.analysis.verdict import (
    BETTER,
    CANNOT_TELL,
    EXPLORATORY,
    INTERIM,
    LEVEL,
    VERDICT_SEEDS,
    WORSE,
    Verdict,
)
from study.arm_colors import color
from study.compare.loaded_studies import LoadedStudy
from study.report.method import difference
from study.report.report_figures import Mark, forest
from study.runs import BASELINE

# The trend of a judged arm's difference over model sizes: a linear contrast over log parameters. Needs no torch.
#
# The effects of the sizes are independent estimates with variances of their own, so the contrast has the degrees of
# freedom of Welch and Satterthwaite. Where a seed shares its batches among the sizes, the effects are correlated
# positively if at all. The contrast then varies less than assumed.


HOLDS = "holds"
SHRINKS = "shrinks"
GROWS = "grows"

RULE = (
    "An effect shrinks or grows if the linear contrast over log parameters differs from zero at 5 %, toward zero or "
    "away from it; without such a contrast it holds if it is called better at every size or worse at every size. "
    "Otherwise the study cannot tell."
)


@dataclass(frozen=True)
class Contrast:
    """Change of a difference (nats) per tenfold parameters, with its interval. dof: Welch-Satterthwaite."""

    slope: Interval
    dof: float
    p_value: float


def contrast(parameters: Sequence[int], effects: Sequence[Verdict]) -> Contrast | None:
    """Return the least-squares slope of the effects over log10 parameters.

    None with under two distinct sizes, or under VERDICT_SEEDS seeds at one of them.
    """
    if len(set(parameters)) < 2 or min(one.seeds for one in effects) < VERDICT_SEEDS:
        return None
    places = [math.log10(count) for count in parameters]
    centre = mean(places)
    scale = math.fsum((place - centre) ** 2 for place in places)
    weights = [(place - centre) / scale for place in places]
    slope = math.fsum(w * one.test.difference.mean for w, one in zip(weights, effects, strict=True))
    parts = [(w * (one.test.spread or 0.0)) ** 2 / one.seeds for w, one in zip(weights, effects, strict=True)]
    variance = math.fsum(parts)
    if variance <= 0:
        return Contrast(Interval(slope, slope, slope, len(effects)), 1.0, float(slope == 0))
    rests = [part**2 / (one.seeds - 1) for part, one in zip(parts, effects, strict=True)]
    dof = variance**2 / math.fsum(rests)
    error = math.sqrt(variance)
    half = t_quantile(1 - min(one.level for one in effects), dof) * error
    interval = Interval(slope, slope - half, slope + half, len(effects))
    return Contrast(interval, dof, min(1.0, 2 * t_tail(abs(slope) / error, dof)))


@dataclass(frozen=True)
class SizeTrend:
    """A judged arm over the sizes. effects: its verdict at each size, None where it has none.

    word: HOLDS, SHRINKS, GROWS or CANNOT_TELL. adjusted_p: of the contrast, for looks and by Holm's method over the
    exploratory arms; None without a contrast.
    """

    arm: str
    role: str
    effects: list[Verdict | None]
    contrast: Contrast | None
    adjusted_p: float | None
    word: str = CANNOT_TELL


def trends(parameters: Sequence[int], by_size: Sequence[Sequence[Verdict]]) -> list[SizeTrend]:
    """Judge the trend of every arm. parameters: of each size; by_size: the verdicts at each size."""
    tables = [{one.variant: one for one in verdicts} for verdicts in by_size]
    found = [_tested(name, parameters, [table.get(name) for table in tables]) for name in _names(tables)]
    family = [one for one in found if one.role == EXPLORATORY and one.adjusted_p is not None]
    adjusted = holm([one.adjusted_p for one in family if one.adjusted_p is not None])
    by_arm = {one.arm: p for one, p in zip(family, adjusted, strict=True)}
    return [_named(replace(one, adjusted_p=by_arm.get(one.arm, one.adjusted_p))) for one in found]


def _names(tables: Sequence[dict[str, Verdict]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _tested(name: str, parameters: Sequence[int], effects: list[Verdict | None]) -> SizeTrend:
    known = [one for one in effects if one is not None]
    complete = len(known) == len(effects) and all(one.word != INTERIM for one in known)
    found = contrast(parameters, known) if complete else None
    role = known[0].role
    if found is None:
        return SizeTrend(name, role, effects, None, None)
    strictest = min(known, key=lambda one: one.level)
    return SizeTrend(name, role, effects, found, adjusted_for_looks(found.p_value, strictest.reads))


def _named(trend: SizeTrend) -> SizeTrend:
    """Choose the word. Toward zero is judged from the side of the mean effect over the sizes."""
    known = [one for one in trend.effects if one is not None]
    if trend.contrast is None or trend.adjusted_p is None:
        return trend
    if trend.adjusted_p < LEVEL:
        side = mean([one.test.difference.mean for one in known])
        return replace(trend, word=SHRINKS if trend.contrast.slope.mean * side < 0 else GROWS)
    words = {one.word for one in known}
    return replace(trend, word=HOLDS) if words in ({BETTER}, {WORSE}) else trend


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
    by_size = [[] if differing else _verdicts(study) for _, study in pairs]
    return SizeComparison(rows, trends([row.parameters for row in rows], by_size), problems)


def _verdicts(study: LoadedStudy) -> list[Verdict]:
    """Return the verdicts of a study, of arms without the learning rates that were chosen at its size."""
    if study.report.tuned is None:
        return study.report.verdicts
    return [replace(one, variant=parse_arm(one.variant).without_rate.name) for one in study.report.verdicts]


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


def sizes_section(report: SizeComparison) -> Section:
    """The figure and the tables of studies of several sizes."""
    return Section(
        "Over model sizes",
        [
            trend_table(report),
            BulletList(report.problems),
            Note(RULE),
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
    return Table.of(report.trends, columns, (1, 2), sortable=True)


def effects_table(report: SizeComparison) -> Table:
    """A row for each arm and size."""
    cells = [
        [trend.arm, row.study, f"{row.parameters:,}", f"{row.flops:.1e}", str(effect.seeds) if effect else "0",
         difference(effect.test.difference) if effect else "-", effect.word if effect else "-"]
        for trend in report.trends
        for row, effect in zip(report.rows, trend.effects, strict=True)
    ]  # fmt: skip
    headings = ["arm", "study", "parameters", "FLOPs", "seeds", "difference [95 %]", "verdict"]
    return Table(headings, cells, (1, 6), sortable=True)


def effects_figure(report: SizeComparison) -> Plain | None:
    """The difference of each arm, a row for each size, the smallest first."""
    arms = [one.arm for one in report.trends]
    marks = [
        Mark(f"{row.study}, {row.parameters / 1e6:.3g} M", arm, color(arm, arms), effect.test.difference, arm)
        for place, row in enumerate(report.rows)
        for arm, trend in zip(arms, report.trends, strict=True)
        if (effect := trend.effects[place])
    ]
    return forest(marks)
