"""Detect the step in which something goes wrong, from loss and gradient norm, before the update of that step.

    nan           loss or gradient norm is not finite
    spike:K       the loss is more than K robust standard deviations above the median of the last 16
    grad_norm:K   so is the logarithm of the gradient norm
    envelope:K    the mean loss of 16 steps is further from that of the reference runs than K times their distance from
                  each other, and than K standard deviations of their noise; once for each time it leaves

The robust standard deviation is that of numerics.diagnose.spikes: the median absolute difference of successive values,
as that of a normal distribution, over the last 64 steps. It is taken as at least LEAST_SCALE, however quiet a run is:
0.02 nats of a loss, 0.288 of the logarithm of a norm, whose distribution has a long tail where batches are small: with
K = 8 a norm counts from 10 times the median on.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from numerics.diagnose.spikes import LEAST, NORMAL, RECENT, WINDOW
from numerics.errors import NumericsError
from numerics.monitor.targets import parse_triggers

LEAST_SCALE = {"spike": 0.02, "grad_norm": 0.288}
LEAST_ENVELOPE = 0.02  # nats
TRIGGERED = "triggers.jsonl"  # of a run: {"step", "trigger", "reason", "checkpoint"}


@dataclass(frozen=True)
class Fired:
    """A trigger and its reason, at one step."""

    trigger: str
    step: int
    reason: str


class Outlier:
    """Values far above a robust running scale."""

    def __init__(self, limit: float, least_scale: float) -> None:
        self.limit, self.least_scale = limit, least_scale
        self.values: deque[float] = deque(maxlen=WINDOW)

    def observe(self, value: float) -> float | None:
        """Append the value. Returns the bound that it exceeds, or None."""
        bound = None
        if len(self.values) >= LEAST:
            steps = (abs(after - before) for before, after in itertools.pairwise(self.values))
            scale = max(NORMAL * median(steps), self.least_scale)
            bound = median(list(self.values)[-RECENT:]) + self.limit * scale
        self.values.append(value)
        return bound if bound is not None and value > bound else None


class Envelope:
    """The losses of two or more reference runs that differ by noise alone, by step.

    Of the references within 64 steps: `width` is the largest distance of their means of 16 steps, and `noise` the
    standard deviation of the mean of 16 losses of another such run from the references' mean.
    """

    def __init__(self, runs: Sequence[Mapping[int, float]], factor: float) -> None:
        self.factor, self.outside = factor, False
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        losses = np.array([[run[step] for step in steps] for run in runs])
        self.places = {step: place for place, step in enumerate(steps)}
        self.centers = losses.mean(0)
        self.residuals = losses - self.centers

    def bound(self, place: int) -> float:
        """Return the half width of the envelope at a place of the references."""
        near = self.residuals[:, max(0, place - WINDOW) : place + WINDOW]
        runs, steps = near.shape
        if steps < RECENT:
            return math.inf
        windows = np.lib.stride_tricks.sliding_window_view(near, RECENT, axis=1).mean(2)
        width = float((windows.max(0) - windows.min(0)).max())
        variance = float((near - near.mean(1, keepdims=True)).var()) * runs / (runs - 1)
        noise = math.sqrt(variance * (1 + 1 / runs) / RECENT)
        return max(self.factor * max(width, noise), LEAST_ENVELOPE)

    def observe(self, step: int, loss: float) -> str | None:
        """Append the loss of a step. Returns how it leaves the envelope, or None; None also where it stays outside."""
        if step not in self.places:
            return None
        if self.recent and step != self.recent[-1][0] + 1:
            self.recent.clear()
        self.recent.append((step, loss))
        if len(self.recent) < RECENT:
            return None
        here = fmean(value - self.centers[self.places[number]] for number, value in self.recent)
        bound = self.bound(self.places[step])
        before, self.outside = self.outside, abs(here) > (bound / 2 if self.outside else bound)
        if before or not self.outside:
            return None
        return f"mean loss of 16 steps {here:+.4f} from the reference runs, whose envelope is {bound:.4f}"


class Triggers:
    """The rules of a run. `observe` every step in order; after a resume, the steps before it by `recall`."""

    def __init__(self, words: Sequence[str], references: Sequence[Mapping[int, float]] = ()) -> None:
        """words: NAME or NAME:K. NumericsError names one that cannot be used."""
        self.factors = parse_triggers(words)
        self.outliers = {
            name: Outlier(self.factors[name], LEAST_SCALE[name])
            for name in LEAST_SCALE
            if name in self.factors
        }
        self.envelope = None
        if "envelope" in self.factors:
            if len(references) < 2:
                raise NumericsError(
                    f"the trigger envelope has {len(references)} reference runs, and their distance is its width; fix: "
                    "name two or more runs of the same settings"
                )
            self.envelope = Envelope(references, self.factors["envelope"])

    def recall(self, step: int, loss: float, gradient_norm: float | None) -> None:
        """Append a step of the past."""
        self.observe(step, loss, math.nan if gradient_norm is None else gradient_norm)

    def observe(self, step: int, loss: float, gradient_norm: float) -> list[Fired]:
        """Append a step. Returns the triggers that it fires."""
        found = []
        values = {"loss": loss, "gradient norm": gradient_norm}
        if "nan" in self.factors:
            found += [
                Fired("nan", step, f"{name} {value}")
                for name, value in values.items()
                if not math.isfinite(value)
            ][:1]
        if math.isfinite(loss):
            if "spike" in self.outliers and (bound := self.outliers["spike"].observe(loss)) is not None:
                found.append(Fired("spike", step, f"loss {loss:.4f}, above {bound:.4f}"))
            if self.envelope and (reason := self.envelope.observe(step, loss)):
                found.append(Fired("envelope", step, reason))
        if "grad_norm" in self.outliers and math.isfinite(gradient_norm) and gradient_norm > 0:
            bound = self.outliers["grad_norm"].observe(math.log(gradient_norm))
            if bound is not None:
                reason = f"gradient norm {gradient_norm:.4g}, above {math.exp(bound):.4g}"
                found.append(Fired("grad_norm", step, reason))
        return found


def read_losses(path: Path) -> dict[int, float]:
    """Return step -> loss of a metrics.jsonl, or of the one in a run's folder. Torn lines are left out."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise NumericsError(f"{file} cannot be read: {error.strerror}; fix: name a run's folder") from error
    found = {}
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("event", "train") == "train":
            step, loss = line.get("iteration"), line.get("loss")
            if isinstance(step, int) and isinstance(loss, int | float):
                found[step] = float(loss)
    if not found:
        raise NumericsError(
            f"{file} has no losses of training steps; fix: name the folder of a run that trained"
        )
    return found


def read_triggers(folder: Path) -> list[dict[str, Any]]:
    """Return the triggers in the folder of a monitor. Torn lines are left out."""
    try:
        lines = (folder / TRIGGERED).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for text in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(text)
            if isinstance(entry, dict) and isinstance(entry.get("step"), int) and "trigger" in entry:
                found.append(entry)
    return found
