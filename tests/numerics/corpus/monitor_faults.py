"""Faults that no second run shows: two runs with the fault agree. The monitor of one run names the tensor."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from numerics.compare.run import compare_records
from numerics.monitor.findings import MonitorFinding, find
from numerics.monitor.monitor import Monitor, MonitorConfig
from tests.numerics.corpus.corpus import Answer, record_run
from tests.numerics.corpus.faults import CHECKSUMS, PairSide
from tests.numerics.corpus.models import IDS, MAKERS, OURS, adamw, loss_of

STEPS, RANKS = 4, 2
TARGETS = ("grad", "param", "adam", "update", "attention")


@dataclass(frozen=True)
class MonitorFault:
    """expected: kind and name of the first finding. model: changes the model before step `at` of every rank.

    optimizer: changes it before the first step, after: after each step. backward: changes a rank's gradients.
    """

    name: str
    expected: str
    at: int = 1
    model: Callable[[Any], None] = lambda model: None
    optimizer: Callable[[Any, torch.optim.Optimizer], None] = lambda model, optimizer: None
    after: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
    backward: Callable[[int, int, Any], None] = lambda rank, step, model: None

    @property
    def answer(self) -> str:
        return f"{self.expected}, step {self.at}"


def _round_moments(optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        for kind in ("exp_avg", "exp_avg_sq"):
            entry[kind].copy_(entry[kind].bfloat16())


def _leave_out(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Leave a layer out of the optimizer, as a filter of names with a mistake does."""
    lost = model.blocks[1].mlp.fc.weight
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not lost]


def _grow_queries(model: Any) -> None:
    """Queries and keys 100 times too large in one layer."""
    with torch.no_grad():
        rows = model.blocks[1].attention.qkv.weight
        rows[: 2 * rows.shape[1]] *= 100


def _lose_gradient(rank: int, step: int, model: Any) -> None:
    if rank == 1 and step >= 3:
        model.blocks[0].attention.proj.weight.grad.zero_()


MONITOR_FAULTS: Sequence[MonitorFault] = (
    MonitorFault("Adam's moments stored in bfloat16", "exp_avg exp_avg", after=_round_moments),
    MonitorFault(
        "a layer that is not in the optimizer",
        "update_ratio blocks.1.mlp.fc.weight",
        optimizer=_leave_out,
    ),
    MonitorFault(
        "exploding attention logits in one layer", "attention blocks.1.attention.sdpa.0", 2, _grow_queries
    ),
    MonitorFault(
        "gradient lost before the reduction on one rank",
        "grad_unreduced blocks.0.attention.proj.weight",
        3,
        backward=_lose_gradient,
    ),
)
CLEAN = MonitorFault("no fault", "")


def monitored(folder: Path, fault: MonitorFault) -> list[MonitorFinding]:
    """Train two ranks, one after another in this process, with a monitor each. Returns what the monitor finds."""
    models: list[Any] = [MAKERS[OURS](0) for _ in range(RANKS)]
    optimizers = [adamw()(model) for model in models]
    place = Path(tempfile.mkdtemp(prefix="monitor", dir=folder))
    config = MonitorConfig(TARGETS, interval=1)
    monitors = [
        Monitor(model, optimizer, config, place, rank)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        fault.optimizer(model, optimizer)
    for step in range(1, STEPS + 1):
        with contextlib.ExitStack() as stack:
            for rank, (model, monitor) in enumerate(zip(models, monitors, strict=True)):
                if step == fault.at:
                    fault.model(model)
                stack.enter_context(monitor.step(step))
                ids = ((IDS + 7 * step) % 199)[rank::RANKS]
                torch.autograd.backward(loss_of(model, ids[:, :-1], ids[:, 1:]) / RANKS)
                fault.backward(rank, step, model)
                monitor.gradients("grad_unreduced")
            _reduce(models)
            for monitor, optimizer in zip(monitors, optimizers, strict=True):
                monitor.gradients("grad_reduced")
                with monitor.update():
                    optimizer.step()
                    fault.after(optimizer)
                optimizer.zero_grad()
    return find(place)


def _reduce(models: Sequence[nn.Module]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        total = torch.stack(gradients).sum(0)
        for gradient in gradients:
            gradient.copy_(total)


def answer(folder: Path, fault: MonitorFault) -> Answer:
    """Right: two records of runs with the fault are equal, and the monitor of one names the expected tensor first."""
    change = PairSide(lambda parts: fault.model(parts.model) if fault.at == 1 else None)
    first, second = (record_run(folder, change, OURS, CHECKSUMS) for _ in range(2))
    compared = compare_records(first, second).verdict
    found = monitored(folder, fault)
    named = f"{found[0].kind} {found[0].name}, step {found[0].step}" if found else "nothing"
    words = f"compare: {compared}; monitor: {found[0].message if found else 'nothing'}"
    return Answer(fault.name, OURS, CHECKSUMS, words, compared == "equal" and named == fault.answer, named)


__all__ = ["CLEAN", "MONITOR_FAULTS", "MonitorFault", "answer", "monitored"]
