"""Room on the disk for what a study will still write, asked for before the first run rather than found out at night."""

from __future__ import annotations

from pathlib import Path

from gpt2.artifacts import run_record
from gpt2.config.config import ModelConfig
from gpt2.system.errors import UserError
from gpt2.system.resource_errors import free_bytes, gib

BYTES_A_PARAMETER = 12  # of a checkpoint: the weight and AdamW's two moments in float32
KEPT = {"cosine": 1, "wsd": 2}  # checkpoints of a finished run: its last, and the one where the decay began
WHILE_RUNNING = 3  # checkpoints of the run in progress: the last two, and the one that is being written
BYTES_AN_ITERATION = 400  # of metrics.jsonl
SPARE_BYTES = 64 * 2**20  # reports, logs, and what else the disk is used for meanwhile


class SpaceError(UserError, OSError):
    """The disk has no room for the study."""


def parameter_count(model: ModelConfig) -> int:
    """Parameters of GPT-2 without biases' share in the variants: 12 C^2 + 13 C a layer, embeddings, the last norm."""
    C = model.width
    return model.layers * (12 * C * C + 13 * C) + (model.padded_vocabulary + model.block_size + 2) * C


def needed_bytes(model: ModelConfig, iterations: list[int], schedule: str = "cosine") -> int:
    """Bytes that runs of so many iterations will write at most; a finished run keeps KEPT[schedule] checkpoints."""
    if not iterations:
        return 0
    checkpoint = BYTES_A_PARAMETER * parameter_count(model)
    checkpoints = KEPT[schedule] * len(iterations) - 1 + WHILE_RUNNING
    return checkpoints * checkpoint + BYTES_AN_ITERATION * sum(iterations) + SPARE_BYTES


def checkpoint_bytes(run_dir: Path) -> int:
    """What the checkpoints of a run that was begun take now."""
    folders = [run_dir / kind for kind in run_record.CHECKPOINTS]
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def require(
    directory: Path, model: ModelConfig, iterations: list[int], schedule: str = "cosine", written: int = 0
) -> None:
    """SpaceError where the disk of `directory` has less than what runs of so many iterations need.

    written: bytes of it that are there already, from runs that were begun.
    """
    needed, free = max(0, needed_bytes(model, iterations, schedule) - written), free_bytes(directory)
    if free < needed:
        raise SpaceError(
            f"{directory} has {gib(free)} of free space; {len(iterations)} runs need about {gib(needed)} "
            f"({gib(BYTES_A_PARAMETER * parameter_count(model))} a checkpoint): free some, or set CONFIG_RESULTS_DIR"
        )
