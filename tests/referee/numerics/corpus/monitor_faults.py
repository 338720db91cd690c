"""Faults that two runs share: the monitor of one run names the tensor."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from referee.numerics.monitor.monitor import Monitor
from referee.numerics.monitor.targets import MonitorConfig
from tests.referee.numerics.corpus.answers import monitored
from tests.referee.numerics.corpus.cases import Corpus, RunFault
from tests.referee.numerics.corpus.models import IDS, adamw, loss_of, ours

STEPS, RANKS = 4, 2
TARGETS = ("grad", "param", "adam", "update", "attention")
Ranks = list[tuple[Any, torch.optim.Optimizer]]  # model and optimizer of each rank
Change = Callable[[int, Ranks], None]  # of a step


def nothing(step: int, ranks: Ranks) -> None:
    """Change nothing."""


def train(
    folder: Path, before: Change = nothing, backward: Change = nothing, after: Change = nothing
) -> list[str]:
    """Train two ranks, one after another in this process, with a monitor each. Returns their findings.

    before, backward, after: changes before a step, after the backward of both ranks, and after their updates.
    """
    models: list[Any] = [ours() for _ in range(RANKS)]
    ranks = [(model, adamw()(model)) for model in models]
    place = Path(tempfile.mkdtemp(prefix="monitor", dir=folder))
    config = MonitorConfig(TARGETS, interval=1)
    monitors = [Monitor(*pair, config, place, rank) for rank, pair in enumerate(ranks)]
    for step in range(1, STEPS + 1):
        before(step, ranks)
        with contextlib.ExitStack() as stack:
            for rank, (model, monitor) in enumerate(zip(models, monitors, strict=True)):
                stack.enter_context(monitor.step(step))
                ids = ((IDS + 7 * step) % 199)[rank::RANKS]
                torch.autograd.backward(loss_of(model, ids[:, :-1], ids[:, 1:]) / RANKS)
            backward(step, ranks)
            for monitor in monitors:
                monitor.gradients("grad_unreduced")
            _reduce(models)
            for monitor, (_, optimizer) in zip(monitors, ranks, strict=True):
                monitor.gradients("grad_reduced")
                with monitor.update():
                    optimizer.step()
                    after(step, [(None, optimizer)])
                optimizer.zero_grad()
    return monitored(place)


def _reduce(models: Sequence[nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        total = torch.stack(gradients).sum(0)
        for gradient in gradients:
            gradient.copy_(total)


def _round_moments(step: int, ranks: Ranks) -> None:
    for _, optimizer in ranks:
        for entry in optimizer.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                entry[kind].copy_(entry[kind].bfloat16())


def _leave_out(step: int, ranks: Ranks) -> None:
    """Leave a layer out of the optimizer, as a filter of names with a mistake does."""
    for model, optimizer in ranks:
        lost = model.blocks[1].mlp.fc.weight
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not lost]


@torch.no_grad()
def _grow(step: int, ranks: Ranks) -> None:
    """Make queries and keys 100 times too large in one layer."""
    for model, _ in ranks:
        rows = model.blocks[1].attention.qkv.weight
        rows[: 2 * rows.shape[1]] *= 100 if step == 2 else 1


def _lose_gradient(step: int, ranks: Ranks) -> None:
    if step >= 3:
        ranks[1][0].blocks[0].attention.proj.weight.grad.zero_()


def _fault(name: str, expected: str, **changes: Change) -> RunFault:
    """Return a fault. Right: the monitor names the expected tensor first."""

    def answer(corpus: Corpus) -> tuple[bool, str]:
        named = (train(corpus.folder, **changes) or ["nothing"])[0]
        return named == expected, named

    return RunFault(name, "monitor", expected, answer)


LAYER = "update_ratio blocks.1.mlp.fc.weight, step 1"
LOST = "grad_unreduced blocks.0.attention.proj.weight, step 3"
MONITOR_FAULTS = (
    _fault("Adam's moments stored in bfloat16", "exp_avg exp_avg, step 1", after=_round_moments),
    _fault("a layer that is not in the optimizer", LAYER, before=_leave_out),
    _fault(
        "exploding attention logits in one layer", "attention blocks.1.attention.sdpa.0, step 2", before=_grow
    ),
    _fault("gradient lost before the reduction on one rank", LOST, backward=_lose_gradient),
)
