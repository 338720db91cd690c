"""Synthetic training curves of known symptoms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from referee.verdict.loss_files import LossCurve

Floats = NDArray[np.float64]


def benchmark(steps: int, noise: float = 0.02, seed: int = 0) -> Floats:
    """A loss that falls from 6 towards 3, with the noise of its batches."""
    draws = np.random.default_rng(seed).standard_normal(steps)
    return (3 + 3 * np.exp(-np.arange(steps) / max(1, steps / 5))) * (1 + noise * draws)


def rounded(losses: Floats, seed: int = 1) -> Floats:
    """The same run on another machine: rounding that training amplifies, from 1e-8 to at most 2e-4."""
    draws = np.random.default_rng(seed).uniform(-1, 1, len(losses))
    return losses * (1 + np.minimum(1e-8 * 1.2 ** np.arange(len(losses)), 2e-4) * draws)


def curve(losses: Sequence[float] | Floats, first: int = 1, every: int = 1, name: str = "run") -> LossCurve:
    return LossCurve(name, {first + every * place: float(value) for place, value in enumerate(losses)})


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
