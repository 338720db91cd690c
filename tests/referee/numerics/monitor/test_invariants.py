"""What holds in every sound training: each fault breaks its invariant, a sound run of two ranks breaks none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from referee.numerics import Monitor, MonitorConfig
from referee.numerics.monitor.invariants import invariants
from referee.numerics.monitor.monitor_tables import TableWriter

STEPS = 8


def train(folder: Path, fault: str = "", config: MonitorConfig | None = None) -> Path:
    """Train two ranks in this process, with averaged gradients and a scheduler. The fault is that of rank 1."""
    config = config or MonitorConfig(("grad", "param"), 1)
    models, optimizers, schedulers, monitors = [], [], [], []
    for rank in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
        trained = list(model.parameters())[: -1 if fault == "optimizer" else None]
        optimizer = torch.optim.AdamW(trained, 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        monitor = Monitor(model, optimizer, config, folder, rank)
        monitor.scheduler = scheduler
        for whole, part in (
            (models, model),
            (optimizers, optimizer),
            (schedulers, scheduler),
            (monitors, monitor),
        ):
            whole.append(part)  # type: ignore[attr-defined]
    if fault == "start":
        with torch.no_grad():
            models[1][0].weight[3] += 1e-3
    draw = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        data = torch.randn(2, 6, 8, generator=draw)
        with contextlib.ExitStack() as stack:
            for rank, monitor in enumerate(monitors):
                stack.enter_context(monitor.step(step))
                optimizers[rank].zero_grad() if fault == "late zero_grad" else None
                models[rank](data[0 if fault == "data" else rank]).square().mean().backward()
                if fault == "lost" and rank and step > 2:
                    models[1][3].weight.grad.zero_()
                monitor.gradients("grad_unreduced")
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([one.grad for one in parameters]).mean(0)
                for one in () if fault == "reduction" and mean.shape == (16,) else parameters:
                    one.grad.copy_(mean)
            for rank, (monitor, optimizer) in enumerate(zip(monitors, optimizers, strict=True)):
                monitor.gradients("grad_reduced")
                if fault != "clipping" or not rank:
                    nn.utils.clip_grad_norm_(models[rank].parameters(), 0.05)
                monitor.gradients("grad_clipped")
                with monitor.update():
                    optimizer.step()
                if fault not in ("zero_grad", "late zero_grad"):
                    optimizer.zero_grad()
                schedulers[rank].step()
                if fault == "scheduler":
                    schedulers[rank].step()
    return folder


@pytest.mark.parametrize("targets", [("grad", "param"), ("all",)])
@pytest.mark.parametrize("fault", ["", "late zero_grad"])
def test_nothing_is_found_in_a_sound_run(tmp_path: Path, fault: str, targets: tuple[str, ...]) -> None:
    assert invariants(train(tmp_path, fault, MonitorConfig(targets, 1))) == []
    assert invariants(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("fault", "call", "place", "evidence"),
    [
        ("clipping", "param 0.weight", "step 1, rank 1", "parameter"),
        ("start", "param 0.weight", "step 1, rank 1", "parameter"),
        ("reduction", "grad_reduced 0.bias", "step 1, rank 1", "computed"),
        ("data", "grad_unreduced 0.weight", "step 1, rank 1", "data"),
        ("zero_grad", "grad_before 3.bias", "step 2", "changed"),
        ("optimizer", "param 3.bias", "step 1", "parameter"),
        ("scheduler", "learning_rate group0", "step 2", "setting"),
        ("lost", "grad_unreduced 3.weight", "step 3, rank 1", "computed"),
    ],
)
def test_a_fault_breaks_its_invariant(
    fault: str, call: str, place: str, evidence: str, tmp_path: Path
) -> None:
    row = invariants(train(tmp_path, fault))[0]
    assert (row.call, row.place, row.evidence) == (call, place, evidence)


def write(folder: Path, kind: str, rank: int, values: dict[str, Any], steps: int = 4) -> None:
    for step in range(1, steps + 1):
        rows = [(name, value(step) if callable(value) else value) for name, value in values.items()]
        TableWriter(folder / f"rank{rank}").write(kind, step, rows)


def test_ranks_of_other_groups_and_parts_of_a_parameter_are_not_replicas(tmp_path: Path) -> None:
    """Four ranks: tensor parallel in pairs, and a parameter of which each rank has a part."""
    for rank in range(4):
        parts = {"w": (1.0 + rank % 2, *[float(rank)] * 7), "part": (5.0 + rank, *[0.0] * 7)}
        write(
            tmp_path,
            "param",
            rank,
            {name: lambda step, v=v: [step * one for one in v] for name, v in parts.items()},
        )
        replicas = [one for one in range(4) if one % 2 == rank % 2]
        layout = {"replicas": replicas, "sharded": ["part", "w"] if rank == 3 else ["part"]}
        (tmp_path / f"rank{rank}/layout.json").write_text(json.dumps(layout))
    assert [row.place for row in invariants(tmp_path)] == ["step 1, rank 2"]


def test_a_logit_unlike_the_others_is_named(tmp_path: Path) -> None:
    logits = {"blocks.0": (1.0, 2.0), "blocks.1": lambda step: (1.0, 900.0 if step > 2 else 3.0)}
    write(tmp_path / "b", "attention", 0, logits)
    assert [(row.call, row.place) for row in invariants(tmp_path / "b")] == [("attention blocks.1", "step 3")]
