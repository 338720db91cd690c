"""Curves of a study's counted runs, mean and range over seeds, thin enough to be drawn. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from referee.verdict.rows import VALIDATION
from referee.verdict.statistics import mean
from study.runs import Run

POINTS = 200  # of a curve
Value = TypeVar("Value")


@dataclass
class Curve:
    """Points of one variant in the order of its tokens; loss in nats, with the lowest and the highest seed."""

    variant: str
    seeds: int
    tokens: list[float]
    seconds: list[float]
    loss: list[float]
    low: list[float]
    high: list[float]


def thinned(places: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of them, evenly spread, with the first and the last."""
    if len(places) <= most:
        return list(places)
    return [places[round(number * (len(places) - 1) / (most - 1))] for number in range(most)]


def validation_curves(used: Sequence[Run]) -> list[Curve]:
    """The points at which every seed of a variant was evaluated, and the mean last point where that is another."""
    curves = []
    for variant, runs in grouped(used).items():
        points = _shared_points([_validations(run) for run in runs])
        losses = [[loss for _, (_, loss) in point] for point in points]
        curves.append(
            Curve(
                variant,
                len(runs),
                tokens=[mean([tokens for tokens, _ in point]) for point in points],
                seconds=[mean([seconds for _, (seconds, _) in point]) for point in points],
                loss=[*map(mean, losses)],
                low=[*map(min, losses)],
                high=[*map(max, losses)],
            )
        )
    return curves


def _shared_points(rows: Sequence[Mapping[int, Value]]) -> list[list[tuple[int, Value]]]:
    """Return (tokens, value) of each row at the tokens that all rows have, and the rows' ends where these differ.

    rows: tokens -> value, of each seed.
    """
    shared = thinned(sorted(set.intersection(*map(set, rows))), POINTS)
    points = [[(tokens, row[tokens]) for row in rows] for tokens in shared]
    last = [(max(row), row[max(row)]) for row in rows]
    if len({tokens for tokens, _ in last}) > 1:
        end = mean([tokens for tokens, _ in last])
        points = [*(point for point in points if point[0][0] < end), last]
    return points


def grouped(used: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by variant."""
    found: dict[str, list[Run]] = {}
    for run in used:
        found.setdefault(run.variant, []).append(run)
    return found


def _validations(run: Run) -> dict[int, tuple[float, float]]:
    """Tokens -> (training seconds, loss) of each evaluation with a finite loss."""
    seconds = run.series(VALIDATION, "train_seconds")
    return {tokens: (seconds[tokens].value, loss) for tokens, loss in run.values.items()}


@dataclass
class Probabilities:
    """Alternation probability of one learned variant: tokens, and a list over layers at each point; seeds' mean."""

    variant: str
    seeds: int
    tokens: list[float]
    layers: list[list[float]]


def probabilities(used: Sequence[Run]) -> list[Probabilities]:
    """Return, for each variant that learns one, the evaluations that all its seeds share, and the mean last one."""
    found = []
    for variant, runs in grouped(used).items():
        learned = [(run.record.learned and run.record.learned.history) or () for run in runs]
        histories = [{row.tokens: list(row.probability) for row in history} for history in learned if history]
        if not histories:
            continue
        points = _shared_points(histories)
        found.append(
            Probabilities(
                variant,
                len(histories),
                [mean([tokens for tokens, _ in point]) for point in points],
                [[mean(layer) for layer in zip(*(p for _, p in point), strict=True)] for point in points],
            )
        )
    return found


@dataclass(frozen=True)
class Scalar:
    """A learned scalar of one variant at the first and the last evaluation: a value for each layer that has it."""

    variant: str
    name: str
    seeds: int
    first: list[float]
    last: list[float]


def scalars(used: Sequence[Run]) -> list[Scalar]:
    """Every learned scalar but the probability; the mean over the seeds that have it in as many layers."""
    found = []
    for variant, runs in grouped(used).items():
        series: dict[str, list[tuple[list[float], list[float]]]] = {}
        for run in runs:
            values: dict[str, list[list[float]]] = {}
            for point in run.record.scalars or ():
                known = [value for value in point.values if value is not None]
                if len(known) == len(point.values):
                    values.setdefault(point.name, []).append(known)
            for name, points in values.items():
                series.setdefault(name, []).append((points[0], points[-1]))
        for name, ends in series.items():
            layers = {len(values) for pair in ends for values in pair}
            if len(layers) == 1:
                moments = [
                    [mean(layer) for layer in zip(*moment, strict=True)] for moment in zip(*ends, strict=True)
                ]
                found.append(Scalar(variant, name, len(ends), *moments))
    return found
