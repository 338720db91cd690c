"""The size of the noise over training. Needs no torch.

Training has K intervals of equal length. Interval 0 has no noise. Then sigma falls geometrically:

    sigma_i = sigma_start (sigma_end / sigma_start)^(i / (K - 2)),   i = 0 .. K - 2 in intervals 1 .. K - 1

Huang et al. 2025, "QeRL: Beyond Efficiency - Quantization-enhanced Reinforcement Learning for LLMs"
(arXiv:2510.11696).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.dotconfig import number_in
from runtime.errors import UserError

INTERVALS = 10
LEAST_INTERVALS = 3
SIGMAS = "(0, 10]"
FINAL = "final"
EXAMPLE = "AQN=mild, AQN=0.05:0.0005, AQN=0.05:0.0005:10 or AQN=mild:final"


class NoiseError(UserError, ValueError):
    """The noise cannot be scheduled."""


@dataclass(frozen=True)
class NoiseSchedule:
    """start, end: standard deviations of the noise. intervals: K. final: whether the model's last norm has noise."""

    start: float
    end: float
    intervals: int = INTERVALS
    final: bool = False

    def __post_init__(self) -> None:
        if self.end > self.start:
            raise NoiseError(
                f"sigma_end {self.end:g} is above sigma_start {self.start:g}; fix: exchange them"
            )
        if self.intervals < LEAST_INTERVALS:
            raise NoiseError(f"{self.intervals} intervals are too few; fix: use {LEAST_INTERVALS} or more")

    def sigma(self, iteration: int, iterations: int) -> float:
        """Return the standard deviation of the noise at step `iteration` of `iterations`, the first is 0."""
        interval = min(self.intervals * iteration // iterations, self.intervals - 1)
        if interval == 0:
            return 0.0
        sigma: float = self.start * (self.end / self.start) ** ((interval - 1) / (self.intervals - 2))
        return sigma


PRESETS = {
    "mild": NoiseSchedule(0.025, 0.00025),
    "qerl": NoiseSchedule(0.05, 0.0005),
    "strong": NoiseSchedule(0.10, 0.001),
}


def parse_noise(text: str) -> NoiseSchedule:
    """Parse the value of AQN: a preset, or start:end[:intervals]; `:final` adds the last norm. NoiseError."""
    words = text.split(":")
    final = len(words) > 1 and words[-1] == FINAL
    words = words[:-1] if final else words
    if len(words) == 1:
        preset = PRESETS.get(words[0])
        if preset is None:
            raise NoiseError(f"AQN={text}: there is no preset {words[0] or '(empty)'}; fix: use {EXAMPLE}")
        return NoiseSchedule(preset.start, preset.end, preset.intervals, final)
    sigmas = [number_in(SIGMAS, word) for word in words[:2]]
    start, end = sigmas if len(sigmas) == 2 else (None, None)
    counted = len(words) == 2 or (len(words) == 3 and re.fullmatch("[0-9]{1,9}", words[2]))
    if start is None or end is None or not counted or "+" in text:  # + begins a modifier of an arm
        raise NoiseError(f"AQN={text} is malformed; sigmas are numbers in {SIGMAS}; fix: use {EXAMPLE}")
    intervals = int(words[2]) if len(words) == 3 else INTERVALS
    try:
        return NoiseSchedule(start, end, intervals, final)
    except NoiseError as error:
        raise NoiseError(f"AQN={text}: {error}") from None
