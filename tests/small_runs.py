"""A very small run in this process: its texts, its configuration, a stop at any check, bitwise equality."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt2.trainer import TrainingRun
from gpt2.transformer import ModelParts
from ra.variants import variant
from runtime import checkpoint, run_plan, run_record
from runtime.batch_plan import plan_batch
from runtime.resolved_target import resolve
from runtime.run_plan import RunPlan
from runtime.settings import (
    BYTES,
    AlternationSettings,
    BatchConfig,
    BudgetConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TargetConfig,
    TrackingConfig,
    Vocabulary,
)
from runtime.signals import Stop

SCHEDULE = ("cosine", 0.2)  # the decay fraction, which a cosine does not have
ALTERNATION = AlternationSettings("output", 0.5, 100.0)


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
    ids: Vocabulary = BYTES,
) -> Config:
    """Two layers of width 16, sequences of 16 tokens, batches of 2 times 2 of them, validated every 128 tokens."""
    return Config(
        model=ModelConfig("test", 2, 2, 16, 16, dropout, ids.size, ids.padded),
        batch=BatchConfig(4, 2),
        budget=BudgetConfig(seconds, 0, iterations),
        optimizer=OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, 1.0, *schedule),
        data=DataConfig("files", (str(texts / "*.txt"),), 0, texts.parent / "prepared", 1, ids.name),
        evaluation=EvaluationConfig(64, 128, False, None, 0),
        target=TargetConfig("cpu", "auto", False, 1, "cpu", True),
        tracking=TrackingConfig(False, "off", ""),
        alternation=ALTERNATION,
        checkpoint_seconds=10**6,
        sha256="0" * 64,
    )


def planned(directory: Path, config: Config, name: str, seed: int = 0, **entries: Any) -> RunPlan:
    """Return the plan of a run of the configured iterations, and write it into the run's folder."""
    plan = RunPlan(
        study=directory.resolve().parents[1].name,
        arm=name,
        seed=seed,
        settings=config,
        **{"iterations": config.budget.max_iterations, "batch": plan_batch(4, 2, 1, 16)} | entries,
    )
    directory.mkdir(parents=True, exist_ok=True)
    run_plan.write(directory, plan)
    return plan


def start(
    directory: Path,
    config: Config,
    name: str = "B",
    stop: Stop | None = None,
    *,
    seed: int = 0,
    alternation: AlternationSettings = ALTERNATION,
    attention: Callable[[int], nn.Module] | None = None,
    **entries: Any,
) -> TrainingRun:
    """Start or resume a run. attention: that of a custom variant. entries: of its plan."""
    plan = planned(directory, config, name, seed, **entries)
    chosen = variant(name, config.model, alternation) if attention is None else None
    parts = chosen.parts if chosen else ModelParts(attention=attention)
    own = chosen.configure(config) if chosen else config
    return TrainingRun(directory, plan, own, resolve(config.target), parts, stop or Stop())


def outcome(directory: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return weights and optimizer, the parts of the record without wall-clock time, and the training losses."""
    loaded = checkpoint.load_latest(directory / "checkpoint")
    assert loaded is not None
    record = run_record.load(directory)
    timeless = {
        "losses": [[tokens, loss] for tokens, _, loss in record.validation.history],
        "learned": record.learned,
        "scalars": record.scalars,
        "progress": [record.progress.iterations, record.progress.tokens],
        "fingerprint": record.fingerprint,
    }
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = [[line["iteration"], line["loss"]] for line in lines if line["event"] == "train"]
    return loaded.state, timeless, losses


class StopAfter(Stop):
    """Request a stop at the n-th check of the run, between steps or in an evaluation."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self.checks = checks

    def check(self) -> None:
        self.checks -= 1
        if self.checks == 0:
            self.requested = "SIGTERM"
        super().check()


def same(one: Any, other: Any) -> bool:
    """Return whether plain data and tensors are bitwise equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
