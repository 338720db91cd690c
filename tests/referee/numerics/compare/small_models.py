"""Records of one step of small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tests.referee.numerics.corpus import models
from tests.referee.numerics.corpus.cases import CHECKSUMS, MODES, VALUES

STATISTICS, TENSORS = dict(MODES[CHECKSUMS]), dict(MODES[VALUES])
ours, step = models.ours, models.STEP


def record(folder: Path, model: nn.Module, run: Any = step, around: Any = None, **settings: Any) -> Path:
    """Record a step of the model. Returns the folder of the step."""
    return models.record(folder, model, run, around, **settings) / "step0"
