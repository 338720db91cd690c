"""Draw changes of perplexity and differences of training losses for plotly."""

from __future__ import annotations

from referee.pages.figures import Plain, axis, figure, line, points
from referee.pages.markup import escape_html
from study.arm_colors import color
from study.compare.alignment import TOLERANCE, Alignment
from study.compare.compared_studies import StudyComparison
from study.report.figures_final import in_percent

# In the order of the studies. The variants' own colors mean variants on every page.
STUDY_COLORS = ("var(--accent)", "var(--bad)", "var(--v8)", "var(--v6)", "var(--v7)", "var(--v9)")
NARROW = {"margin": {"l": 90, "r": 12}, "font": {"size": 11}}


def changes(comparison: StudyComparison) -> Plain | None:
    """Change of perplexity: one row for each variant, one point with its interval for each study."""
    rows = comparison.changes()
    if not rows:
        return None
    first, *others = labels = [study.label for study in comparison.studies]
    series = [f"{label} against {first}" for label in others] if comparison.absolute else labels
    data = []
    for place, name in enumerate(series):
        known = [(variant, interval) for variant, changed in rows if (interval := changed[place])]
        estimates = [in_percent(interval) for _, interval in known]
        data.append(
            points(
                name,
                STUDY_COLORS[place % len(STUDY_COLORS)],
                estimates,
                [escape_html(variant) for variant, _ in known],
                ["circle-open" if low is None else "circle" for _, low, _ in estimates],
                orientation="h",
                hovertemplate=f"%{{y}}: %{{x:+.3g}} %<extra>{escape_html(name)}</extra>",
            )
        )
    names = [escape_html(variant) for variant, _ in reversed(rows)]
    return figure(
        data,
        140 + 44 * len(rows),
        (130, 24, 34, 48),
        NARROW,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        scattermode="group",
        xaxis=axis("change, % of perplexity (left is better)", zeroline=True, zerolinewidth=2),
        yaxis={"type": "category", "categoryorder": "array", "categoryarray": names, "automargin": "left"},
    )


def curves(lines: list[Alignment], variants: list[str]) -> Plain:
    """Relative difference of losses in percent against iteration, one line for each run, on a logarithmic axis.

    A zero leaves a gap: a logarithmic axis cannot show it.
    """
    data = [
        line(
            one.run,
            color(one.variant, variants),
            group=one.variant,
            width=1.6,
            x=list(one.curve),
            y=[float(f"{100 * value:.4g}") if value > 0 else None for value in one.curve.values()],
            hovertemplate=f"iteration %{{x}}: %{{y:.3g}} %<extra>{escape_html(one.run)}</extra>",
        )
        for one in lines
    ]
    end = max(one.iterations for one in lines)
    data.append(
        line("one percent", "var(--ink)", width=1.2, dash="dash", x=[1, end], y=[100 * TOLERANCE] * 2)
    )
    across = axis("iteration", exponentformat="SI", minexponent=4)
    upwards = axis("difference of the loss, %", type="log", nticks=7)
    return figure(data, 400, (66, 24, 12, 48), NARROW, xaxis=across, yaxis=upwards)
