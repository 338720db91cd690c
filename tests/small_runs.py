"""A very small run in this process: its texts, its configuration, a stop at any place, equality to the bit."""

from pathlib import Path
from typing import Any

import torch

from gpt2.config.config import (
    BatchConfig,
    BudgetConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TargetConfig,
    TrackingConfig,
)
from gpt2.system.signals import Stop

SCHEDULE = ("cosine", 0.2)  # and the share of the decay, which a cosine does not have


def write_texts(folder: Path, words: str = "the cat {} sat on the mat. ", times: int = 8) -> Path:
    """Eighty short stories, a document each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(80):
        (folder / f"{number:02d}.txt").write_text(f"Story {number}: " + words.format(number) * times)
    return folder


def configuration(
    texts: Path,
    iterations: int,
    *,
    dropout: float = 0.0,
    seconds: int = 0,
    schedule: tuple[str, float] = SCHEDULE,
) -> Config:
    """Two layers of width 16, sequences of 16 tokens, batches of 2 times 2 of them, validated every 128 tokens."""
    return Config(
        model=ModelConfig("test", 2, 2, 16, 16, dropout),
        batch=BatchConfig(4, 2),
        budget=BudgetConfig(seconds, 0, iterations),
        optimizer=OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, 1.0, *schedule),
        data=DataConfig("files", (str(texts / "*.txt"),), 0, texts.parent / "prepared", 1),
        evaluation=EvaluationConfig(64, 128, False, None, 0),
        target=TargetConfig("cpu", "auto", False, 1, "cpu", True),
        tracking=TrackingConfig(False, "off", "", False),
        checkpoint_seconds=10**6,
        sha256="0" * 64,
    )


class StopAfter(Stop):
    """Asks to stop at the n-th time that the run looks, wherever that is: between steps or in an evaluation."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def check(self) -> None:
        self.looks -= 1
        if self.looks == 0:
            self.requested = "SIGTERM"
        super().check()


def same(one: Any, other: Any) -> bool:
    """Plain data and tensors, equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
