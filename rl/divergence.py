"""Decide that a run diverged: a loss or gradient norm that is not finite, a gradient that explodes, a lost reward."""

from __future__ import annotations

import math

GRADIENT_LIMIT = 1000.0  # norm before clipping; clipping is at 1
WINDOW = 10  # steps of a mean reward
LEAST_REWARD = 0.1  # mean of the best window, below which a loss of reward cannot be seen
COLLAPSED = 0.25  # share of the best window's mean


class DivergedError(RuntimeError):
    """The run diverged. The message says why."""


class DivergenceMonitor:
    """Observes the steps of a run."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def observe(self, loss: float | None, gradient_norm: float | None, reward: float | None) -> None:
        """Add a step. DivergedError if the run diverged.

        The reward collapsed if its mean over the last WINDOW steps is below COLLAPSED of the mean of the best WINDOW
        steps before them, which is at least LEAST_REWARD.
        """
        for name, value in (("loss", loss), ("gradient norm", gradient_norm), ("reward", reward)):
            if value is not None and not math.isfinite(value):
                raise DivergedError(f"the {name} is {value}")
        if gradient_norm is not None and gradient_norm > GRADIENT_LIMIT:
            raise DivergedError(f"the gradient norm is {gradient_norm:.3g}, above {GRADIENT_LIMIT:g}")
        if reward is not None:
            self.rewards.append(reward)
        means = [
            sum(self.rewards[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(self.rewards) + 1)
        ]
        best = max(means[:-WINDOW], default=0.0)
        if best >= LEAST_REWARD and means[-1] < COLLAPSED * best:
            raise DivergedError(f"the mean reward of {WINDOW} steps fell from {best:.3f} to {means[-1]:.3f}")
