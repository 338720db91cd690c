"""Draw changes of perplexity and differences of training losses for plotly."""

from __future__ import annotations

from typing import Any

from referee.pages.markup import escape_html
from referee.pages.plots import Plain, axis, figure, line, points
from study.arm_colors import color
from study.compare.alignment import TOLERANCE, Alignment
from study.compare.compared_studies import StudyComparison
from study.report.figures_final import in_percent

# In the order of the studies. The variants' own colors mean variants on every page.
STUDY_COLORS = ("var(--accent)", "var(--bad)", "var(--v8)", "var(--v6)", "var(--v7)", "var(--v9)")
NARROW = {"margin": {"l": 50, "r": 20}, "font": {"size": 11}, "height": 330}


def changes(comparison: StudyComparison) -> Plain | None:
    """Change of perplexity: one row for each variant, one point with its interval for each study."""
    labels = [study.label for study in comparison.studies]
    series, what = labels, "change to the study's control arms"
    if comparison.absolute:
        series, what = [f"{label} against {labels[0]}" for label in labels[1:]], f"change to {labels[0]}"
    rows = comparison.changes()
    if not rows:
        return None
    data = []
    for place, name in enumerate(series):
        found = [(variant, interval) for variant, of_study in rows if (interval := of_study[place])]
        estimates = [in_percent(interval) for _, interval in found]
        data.append(
            points(
                name,
                STUDY_COLORS[place % len(STUDY_COLORS)],
                estimates,
                [escape_html(variant) for variant, _ in found],
                ["circle-open" if low is None else "circle" for _, low, _ in estimates],
                orientation="h",
                hovertemplate=f"%{{y}}: %{{x:+.3g}} %<extra>{escape_html(name)}</extra>",
            )
        )
    names = [escape_html(variant) for variant, _ in reversed(rows)]
    title = f"{escape_html(what)}, % of perplexity (left is better)"
    height = 140 + 44 * len(rows)
    narrow = {"margin": {"l": 16 + 7 * max(map(len, names)), "r": 12}, "height": height + 10}
    return figure(
        data,
        height,
        (130, 24, 34, 48),
        NARROW | narrow | {"xaxis": axis("change, % of perplexity")},
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        scattermode="group",
        xaxis=axis(title, zeroline=True, zerolinewidth=2),
        yaxis={"type": "category", "categoryorder": "array", "categoryarray": names},
    )


def curves(lines: list[Alignment], variants: list[str]) -> Plain:
    """Relative difference of losses in percent against iteration, one line for each run, on a logarithmic axis."""
    data = [
        _curve(one.run, one.curve, color(one.variant, variants), group=one.variant, width=1.6)
        for one in lines
    ]
    for seed, envelope in sorted(
        {one.seed: one.envelope_curve for one in lines if one.envelope_curve}.items()
    ):
        data.append(_curve(f"control arms, seed {seed}", envelope, "var(--noise)", width=1.4, dash="dot"))
    limit = {1: TOLERANCE, max(one.iterations for one in lines): TOLERANCE}
    data.append(_curve("one percent", limit, "var(--ink)", width=1.2, dash="dash"))
    across = axis("iteration", exponentformat="SI", minexponent=4)
    upwards = axis("difference of the loss, %", type="log", nticks=7)
    return figure(data, 400, (66, 24, 12, 48), NARROW, xaxis=across, yaxis=upwards)


def _curve(name: str, curve: dict[int, float], ink: str, **style: Any) -> Plain:
    """One line. A zero leaves a gap: a logarithmic axis cannot show it."""
    y = [float(f"{100 * value:.4g}") if value > 0 else None for value in curve.values()]
    hover = f"iteration %{{x}}: %{{y:.3g}} %<extra>{escape_html(name)}</extra>"
    return line(name, ink, x=list(curve), y=y, hovertemplate=hover, **style)
