"""Monitor files without a training: columns as the contract says (referee/numerics/monitor/monitor_tables.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HOSTILE = "</script><img src=x onerror=window.taken=1>"


def names(layers: int = 3) -> list[str]:
    """The parameters of a small transformer, in its order."""
    parts = ("attention.qkv.weight", "attention.out.weight", "mlp.fc.weight", "mlp.out.weight")
    blocks = [f"blocks.{layer}.{part}" for layer in range(layers) for part in parts]
    return ["embedding.weight", *blocks, "head.weight"]


def noisy(tensors: int, steps: int, seed: int = 0, noise: float = 0.1) -> NDArray[np.float64]:
    """Norms with a common trend and independent noise: (tensors, steps)."""
    generator = np.random.default_rng(seed)
    levels = generator.lognormal(0, 1, (tensors, 1))
    trend = 1 + 2 * np.exp(-np.arange(steps) / max(steps / 5, 1))
    return np.asarray(levels * trend * np.exp(noise * generator.standard_normal((tensors, steps))))


def write_monitor(
    folder: Path,
    norms: NDArray[np.float64],
    kind: str = "grad_reduced",
    rank: int = 0,
    tensors: Sequence[str] = (),
    steps: Sequence[int] = (),
    more: Mapping[str, NDArray[np.float64]] | None = None,
    column: str = "norm",
    per_file: int = 1000,
) -> None:
    """Write the norms (tensors, steps) as a column, and `more` statistics of the same shape."""
    tensors = tensors or names()[: len(norms)]
    steps = steps or range(1, norms.shape[1] + 1)
    columns = {column: norms, **(more or {})}
    place = folder / f"monitor/rank{rank}"
    place.mkdir(parents=True, exist_ok=True)
    lines: dict[int, list[str]] = {}
    for at, step in enumerate(steps):
        for row, name in enumerate(tensors):
            values = ",".join(f"{column[row, at]:.9g}" for column in columns.values())
            lines.setdefault(step // per_file * per_file, []).append(f"0,{name},{step},{values}")
    for first, part in lines.items():
        head = ",".join(("vpp_stage", "name", "step", *columns))
        (place / f"{kind}_{first}-{first + per_file - 1}.csv").write_text("\n".join([head, *part]) + "\n")


def write_losses(folder: Path, losses: Sequence[float], norms: Sequence[float] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'{{"event": "train", "iteration": {step}, "loss": {loss!r}'
        + (f', "grad_norm": {norms[step - 1]!r}' if len(norms) else "")
        + "}"
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
