"""Differences and ranks of the variants over the course of training, as one figure for plotly (plain data)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pages.components import color
from pages.markup import escape_figure
from ra.names import is_control_arm
from study.analysis.equivalence import Losses, control_losses, noise_band
from study.analysis.verdict import BETTER, VERDICT_SEEDS, WORSE, judge
from study.records.runs import Run, losses
from study.report.build import Report
from study.report.figures import MARGIN, NARROW, SCALES, rounded, symbol
from study.stats.statistics import mean, noise_floor, perplexity_percent


def over_training(report: Report, places: Sequence[int]) -> dict[str, Any] | None:
    """Each variant's difference to the mean of the control arms during training, with their noise; and ranks.

    places: the tokens at which every counted run was evaluated. Means are over the seeds that all variants have;
    ranks need as many as a verdict. None where there is nothing to compare.
    """
    used = [run for run in report.runs if run.used]
    tables = [_table_at(used, tokens) for tokens in places]
    seeds = sorted(set.intersection(*(set(own) for own in tables[0].values()))) if tables else []
    variants = [row.variant for row in report.rows]
    arms = [name for name in variants if is_control_arm(name)]
    if not seeds or len(variants) < 2 or not arms:
        return None
    means = [{name: mean([table[name][seed] for seed in seeds]) for name in variants} for table in tables]
    band = [_band(places)] if (halves := _noise(tables, seeds)) else []
    upright = {"title": {"text": "% of perplexity"}, "zeroline": True, "nticks": 7}
    views = [{"name": "difference", "data": _differences(means, arms, halves), "layout": {"yaxis": upright}}]
    if len(seeds) >= VERDICT_SEEDS:
        ladder = {"title": {"text": "rank (1 is best)"}, "dtick": 1, "range": [len(variants) + 0.5, 0.5]}
        hide: list[dict[str, Any]] = [{"x": [], "y": []}] if band else []
        ranks = _ranks(tables, means, arms, seeds)
        views.append({"name": "rank", "data": hide + ranks, "layout": {"yaxis": ladder}})
    return {
        "data": band + [_line(name, variants, places) for name in variants],
        "layout": {
            "height": 380,
            "margin": MARGIN,
            "xaxis": {"title": {"text": "tokens"}, "tickformat": "~s"},
        },
        "narrow": NARROW,
        "labelled": True,
        "choices": [{"label": "What", "options": views}, {"label": "Horizontal scale", "options": SCALES}],
    }


def in_words(report: Report, figure: dict[str, Any] | None) -> str:
    """How often a real change differs from the control arms during training; "" without ranks."""
    views = figure["choices"][0]["options"] if figure else []
    ranks = next((view["data"] for view in views if view["name"] == "rank"), None)
    if figure is None or ranks is None:
        return ""
    rows = {
        trace["meta"]["variant"]: rank["y"]
        for trace, rank in zip(figure["data"], ranks, strict=True)
        if "meta" in trace
    }
    arms = next(places for name, places in rows.items() if is_control_arm(name))
    said = []
    for name, places in rows.items():
        if not is_control_arm(name):
            better = sum(a < b for a, b in zip(places, arms, strict=True))
            worse = sum(a > b for a, b in zip(places, arms, strict=True))
            said.append(
                f"{name} is better than the control arms at {better}, worse at {worse} and not different at "
                f"{len(places) - better - worse} of {len(places)} points of evaluation, each tested alone."
            )
    return " ".join(said)


def _table_at(used: Sequence[Run], tokens: int) -> Losses:
    found: dict[str, dict[int, float]] = {}
    for run in used:
        if run.seed is not None:
            found.setdefault(run.variant, {})[run.seed] = losses(run.record)[tokens]
    return found


def _noise(tables: Sequence[Losses], seeds: Sequence[int]) -> list[float]:
    """At each place half the width (nats) of the band that holds a variant without effect; empty without a floor."""
    halves = []
    for table in tables:
        at_seeds = control_losses(table, seeds)
        floor = noise_floor(at_seeds)
        if floor is None:
            return []
        halves.append(noise_band(floor, [len(arms) for arms in at_seeds]))
    return halves


def _centre(at: dict[str, float], arms: Sequence[str]) -> float:
    """The mean of the arms; those that agree to the last bit are one."""
    return mean(list(dict.fromkeys(at[name] for name in arms)))


def _differences(
    means: Sequence[dict[str, float]], arms: Sequence[str], halves: list[float]
) -> list[dict[str, Any]]:
    centre = [_centre(at, arms) for at in means]
    hover = "%{y:+.3f} % at %{x:.4s} tokens"
    band = [perplexity_percent(half) for half in halves] + [
        perplexity_percent(-half) for half in reversed(halves)
    ]
    lines = [
        [perplexity_percent(at[name] - middle) for at, middle in zip(means, centre, strict=True)]
        for name in means[0]
    ]
    return ([{"y": rounded(band)}] if halves else []) + [
        {"y": rounded(y), "hovertemplate": hover} for y in lines
    ]


def _differs(table: Losses, name: str, seeds: Sequence[int]) -> bool:
    """Whether the rule of the verdict, for this variant alone, finds a difference to the control arms."""
    alone = {
        other: {seed: by_seed[seed] for seed in seeds}
        for other, by_seed in table.items()
        if other == name or is_control_arm(other)
    }
    return any(verdict.word in (BETTER, WORSE) for verdict in judge(alone))


def _ranks(
    tables: Sequence[Losses], means: Sequence[dict[str, float]], arms: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """The middle of the places that a variant shares: control arms share theirs with what does not differ from them."""
    hover = "rank %{y} at %{x:.4s} tokens"
    rows: dict[str, list[float]] = {name: [] for name in means[0]}
    for table, at in zip(tables, means, strict=True):
        centre = _centre(at, arms)
        apart = [name for name in at if name not in arms and _differs(table, name, seeds)]
        ordered = sorted(apart, key=at.__getitem__)
        better = [name for name in ordered if at[name] < centre]
        shared = len(better) + (len(at) - len(apart) + 1) / 2
        for name, places in rows.items():
            place = ordered.index(name) + 1 if name in apart else shared
            places.append(place if name in better or name not in apart else place + len(at) - len(apart))
    return [{"y": ranks, "hovertemplate": hover} for ranks in rows.values()]


def _line(name: str, variants: Sequence[str], places: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape_figure(name),
        "x": list(places),
        "line": {"color": color(name, variants), "width": 2},
        "marker": {"symbol": symbol(name, variants), "size": 7},
        "meta": {"variant": escape_figure(name), "label": escape_figure(name)},
    }


def _band(places: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "noise",
        "x": [*places, *reversed(places)],
        "fill": "toself",
        "fillcolor": "var(--noise, 0.16)",
        "line": {"width": 0, "color": "var(--noise, 0)"},
        "hoverinfo": "skip",
    }
