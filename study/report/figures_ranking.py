"""Differences and ranks of the variants over the course of training, as one figure for plotly (plain data)."""

from __future__ import annotations

from collections.abc import Sequence

from ra.arms import control_arms, control_groups, controls_of
from referee.pages.figures import Plain, axis, band, figure
from referee.verdict.statistics import mean, noise_floor, perplexity_percent
from study.analysis.verdict import (
    BETTER,
    INTERIM,
    VERDICT_SEEDS,
    WORSE,
    Losses,
    control_losses,
    judge,
    noise_band,
)
from study.experiment import Design
from study.report.figures import MARGIN, NARROW, SCALES, rounded, variant_line
from study.report.report_data import Report
from study.runs import losses


def over_training(report: Report, places: Sequence[int]) -> tuple[Plain | None, str]:
    """Each variant's difference to the mean of the control arms during training, with their noise; and ranks.

    places: the tokens at which every counted run was evaluated. Means are over the seeds that all variants have;
    ranks need as many as a verdict. None where there is nothing to compare. Also returns a sentence on the ranks.
    """
    by_run = {(run.variant, run.seed): losses(run.record) for run in report.runs if run.used}
    names = [name for name in report.variants if controls_of(name, report.variants)]
    every = [{seed for name, seed in by_run if name == variant and seed is not None} for variant in names]
    seeds = sorted(set.intersection(*every)) if places else []
    if not seeds or len(names) < 2:
        return None, ""
    tables = [{name: {seed: by_run[name, seed][at] for seed in seeds} for name in names} for at in places]
    hover = "%{y:+.3f} % at %{x:.4s} tokens"
    lines = []
    for name in names:
        means = [mean(list(table[name].values())) for table in tables]
        centres = [mean([mean(arms) for arms in control_losses(table, arm=name)]) for table in tables]
        percents = [perplexity_percent(loss - centre) for loss, centre in zip(means, centres, strict=True)]
        lines.append({"y": rounded(percents), "hovertemplate": hover})
    data = [variant_line(name, names, 7, x=list(places)) for name in names]
    halves = _noise(tables)
    if halves:
        edges = [perplexity_percent(half) for half in halves + [-half for half in reversed(halves)]]
        lines.insert(0, {"y": rounded(edges)})
        data.insert(0, band("noise", "var(--noise)", 0.16, x=[*places, *reversed(places)]))
    upright = axis("% of perplexity", zeroline=True, nticks=7)
    views = [{"name": "difference", "data": lines, "layout": {"yaxis": upright}}]
    said = ""
    interim = any(verdict.word == INTERIM for verdict in report.verdicts)
    if len(seeds) >= VERDICT_SEEDS and not interim and len(control_groups(names)) == 1:
        words = [_words(table, report.design) for table in tables]
        ladder = axis("rank (1 is best)", dtick=1, range=[len(names) + 0.5, 0.5])
        hover = "rank %{y} at %{x:.4s} tokens"
        ranks = [_ranks(table, found) for table, found in zip(tables, words, strict=True)]
        lines = [{"y": [rank[name] for rank in ranks], "hovertemplate": hover} for name in names]
        hidden: list[Plain] = [{"x": [], "y": []}] if halves else []
        views.append({"name": "rank", "data": hidden + lines, "layout": {"yaxis": ladder}})
        said = " ".join(_sentence(name, [found[name] for found in words]) for name in words[0])
    choices = [{"label": "What", "options": views}, {"label": "Horizontal scale", "options": SCALES}]
    across = axis("tokens", tickformat="~s")
    return figure(data, 380, MARGIN, NARROW, choices, xaxis=across), said


def _noise(tables: Sequence[Losses]) -> list[float]:
    """At each place half the width (nats) of the band that holds a variant without effect; empty without a floor."""
    halves = []
    for table in tables:
        arms = control_losses(table)
        floor = noise_floor(arms)
        if floor is None:
            return []
        halves.append(noise_band(floor, list(map(len, arms))))
    return halves


def _words(table: Losses, design: Design) -> dict[str, str]:
    """The word of each real change, by the rule for one variant alone."""
    arms = {name: table[name] for name in control_arms(table)}
    real = {name: by_seed for name, by_seed in table.items() if name not in arms}
    return {
        name: judge(arms | {name: by_seed}, looks=design.looks, finished=design.finished)[0].word
        for name, by_seed in real.items()
    }


def _ranks(table: Losses, words: dict[str, str]) -> dict[str, float]:
    """The middle of the places that a variant shares: control arms share theirs with what does not differ from them."""
    means = {name: mean(list(by_seed.values())) for name, by_seed in table.items()}
    better, worse = (
        sorted((name for name, word in words.items() if word == side), key=means.__getitem__)
        for side in (BETTER, WORSE)
    )
    shared = len(better) + (len(table) - len(better) - len(worse) + 1) / 2
    ranks = dict.fromkeys(table, shared)
    ranks |= {name: place for place, name in enumerate(better, 1)}
    return ranks | {name: place for place, name in enumerate(worse, len(table) - len(worse) + 1)}


def _sentence(name: str, words: Sequence[str]) -> str:
    """How often a real change differs from the control arms."""
    better, worse = words.count(BETTER), words.count(WORSE)
    return (
        f"Exploratory: the loss of {name} is lower than that of the control arms at {better}, higher at {worse} and "
        f"not separated at {len(words) - better - worse} of {len(words)} points of evaluation, each tested alone."
    )
