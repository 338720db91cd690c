"""Sampled texts as plain data. Needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SampledText:
    """One text of one run. nats_per_token: minus the mean log-probability of its tokens under the model."""

    text: str
    tokens: int
    nats_per_token: float


@dataclass(frozen=True)
class RunSamples:
    """The texts of one run. notes: what its reader needs to know, such as a checkpoint that was skipped."""

    run: str
    variant: str
    seed: int
    iteration: int
    texts: tuple[SampledText, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingSettings:
    """prompt: empty for the end-of-text token alone. tokens: new ones of each text. seed: of the first text."""

    prompt: str
    tokens: int
    count: int
    seed: int
    temperature: float
    top_k: int
    top_p: float


def as_json(runs: list[RunSamples], settings: SamplingSettings) -> dict[str, Any]:
    return {
        "settings": dataclasses.asdict(settings),
        "runs": [dataclasses.asdict(run) for run in runs],
    }
