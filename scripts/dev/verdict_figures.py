"""Draw the figures of docs/verdicts.md as SVG files.

python -m scripts.dev.verdict_figures [FOLDER]    docs/pictures by default; half a minute
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from referee.pages.markup import escape_html
from referee.verdict.looks import FIRST_SHARE, nominal_levels
from referee.verdict.power import exaggeration, mde
from referee.verdict.statistics import perplexity_percent, t_quantile, t_tail
from runtime.errors import run_command
from runtime.files import write_text
from scripts.dev.simulate_verdicts import SIGMA, any_look, differences, judge_all
from study.analysis.verdict import SQUARE

STUDIES = 20_000
SEEDS = 5  # of the figure of the test
SPREAD = SIGMA * math.sqrt(1.25)  # nats: of the difference of one run to the mean of four control arms
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 330, 56, 150, 42, 48  # pixels
INKS = ("#0b6bcb", "#c2410c", "#15803d", "#7c3aed")
Line = Sequence[tuple[float, float]]


def chart(
    title: str, across: str, ticks: Sequence[float], upward: Sequence[float], lines: Mapping[str, Line]
) -> str:
    """Return a line chart. ticks, upward: of the axes, which begin and end at their first and last."""

    def x(value: float) -> float:
        return LEFT + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - upward[0]) / (upward[-1] - upward[0]) * (HEIGHT - TOP - BOTTOM)

    def text(left: float, top: float, words: str, style: str = "") -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" {style}>{escape_html(words)}</text>'

    parts = [text(LEFT, 22, title, 'font-size="15" font-weight="600"')]
    for tick in upward:
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y(tick) + 4, f"{tick:g}", 'text-anchor="end"'))
    parts += [text(x(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", 'text-anchor="middle"') for tick in ticks]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, 'text-anchor="middle"'))
    heights: list[float] = []
    for ink, (name, points) in zip(INKS, lines.items(), strict=False):
        path = " ".join(f"{x(a):.1f},{y(min(b, upward[-1])):.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2.5"/>')
        height = y(min(points[-1][1], upward[-1])) + 4
        while any(abs(height - other) < 15 for other in heights):
            height -= 1
        heights.append(height)
        parts.append(text(WIDTH - RIGHT + 8, height, name, f'fill="{ink}"'))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12.5" fill="#222">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def paired_test() -> str:
    """False verdicts against the variance of the variant, with the spread of the differences or of the arms."""
    paired, pooled = [], []
    for ratio in range(1, 11):
        values = differences(np.random.default_rng(ratio), STUDIES, SEEDS, ratio)[0]
        paired.append((ratio, 100 * float(judge_all(values, (SEEDS,)).called.mean())))
        dof = SEEDS * (len(SQUARE) - 1)
        wider = math.sqrt((ratio + 0.25) / 1.25)  # true standard error over the one that the arms give
        pooled.append((ratio, 200 * t_tail(t_quantile(0.95, dof) / wider, dof)))
    return chart(
        "False verdicts (%), 5 seeds", "variance of the variant over that of a control arm",
        range(1, 11), range(0, 51, 10), {"spread of the arms": pooled, "paired t": paired},
    )  # fmt: skip


def looks() -> str:
    """False verdicts against the number of looks."""
    values = differences(np.random.default_rng(0), STUDIES, 12)[0]
    kept, plain = [], []
    for last in range(3, 13):
        reads = tuple(range(3, last + 1))
        each = [judge_all(values, (seeds,), 0.05 / FIRST_SHARE).called for seeds in reads]
        kept.append((len(reads), 100 * float(any_look(values, reads).mean())))
        plain.append((len(reads), 100 * float(np.any(each, axis=0).mean())))
    return chart(
        "False verdicts (%), read at 3, 4, 5, ... seeds", "number of looks", range(1, 11), range(0, 21, 5),
        {"plain t test": plain, "this project": kept},
    )  # fmt: skip


def equivalence() -> str:
    """Share of studies that are equivalent within 1 %, against the true change."""
    lines = {}
    for seeds in (5, 9, 15):
        values = differences(np.random.default_rng(seeds), STUDIES, seeds)[0]
        shares = (
            (one, 100 * float(judge_all(values + math.log1p(one / 100), (seeds,)).equivalent.mean()))
            for one in np.linspace(0, 1.5, 31).tolist()
        )
        lines[f"{seeds} seeds"] = list(shares)
    ticks = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)
    return chart(
        '"Equivalent within 1 %" (% of studies)',
        "true change of perplexity (%)",
        ticks,
        range(0, 101, 20),
        lines,
    )


def curse() -> str:
    """How many times too large the called estimates are, against the true change."""
    level = nominal_levels((3,))[0]
    lines = {}
    for seeds in (3, 5, 9):
        error = SPREAD / math.sqrt(seeds)
        changes = np.linspace(0.25, 3, 56).tolist()
        lines[f"{seeds} seeds"] = [
            (one, exaggeration(math.log1p(one / 100) / error, seeds - 1, level)) for one in changes
        ]
    ticks = (0, 0.5, 1, 1.5, 2, 2.5, 3)
    return chart(
        "Called estimates: how many times as large as the truth",
        "true change of perplexity (%)",
        ticks,
        range(1, 6),
        lines,
    )


def seeds_needed() -> str:
    """The change that a planned number of seeds finds in 80 % of studies."""
    level, counts = nominal_levels((3,))[0], range(3, 31)
    lines = {
        f"variance ratio {ratio}": [
            (seeds, perplexity_percent(mde(SIGMA * math.sqrt(ratio + 0.25), seeds, level)))
            for seeds in counts
        ]
        for ratio in (1, 4, 10)
    }
    title = "Change of perplexity (%) found in 80 % of studies"
    return chart(title, "planned seeds", range(3, 31, 3), range(9), lines)


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    for name, draw in {
        "test": paired_test,
        "looks": looks,
        "equivalence": equivalence,
        "exaggeration": curse,
        "seeds": seeds_needed,
    }.items():
        write_text(folder / f"verdict-{name}.svg", draw())
    return 0


if __name__ == "__main__":
    run_command(main)
