"""The monitor reads every kind of tensor as an independent computation does."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2, ModelParts
from ra.reciprocal_attention import LearnedAttention
from referee.numerics import Monitor, MonitorConfig
from referee.numerics.monitor.monitor_tables import read_series
from tests.referee.numerics.monitor.table_rows import read_rows

IDS = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(0))


def learned(recompute: bool) -> GPT2:
    def attention(layer: int) -> nn.Module:
        return LearnedAttention(
            16, 2, initial_probability=0.3, learning_rate_multiplier=1.0, recompute=recompute
        )

    return GPT2(
        layers=2, heads=2, width=16, block_size=8, vocabulary=50, padded_vocabulary=64,
        parts=ModelParts(attention=attention),
    )  # fmt: skip


def gpt2() -> GPT2:
    return GPT2(layers=2, heads=2, width=16, block_size=8, vocabulary=50, padded_vocabulary=64)


def prepared(model: GPT2) -> tuple[GPT2, torch.optim.Optimizer]:
    initialise(model, 0)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def train(model: GPT2, optimizer: torch.optim.Optimizer, monitor: Monitor, steps: int) -> None:
    """Two micro-batches a step, clipped."""
    for step in range(1, steps + 1):
        with monitor.step(step):
            for ids in IDS.split(2):
                (model.loss(ids[:, :-1], ids[:, 1:]) / 2).backward()
            monitor.gradients("grad_reduced")
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            monitor.gradients("grad_clipped")
            with monitor.update():
                optimizer.step()
            optimizer.zero_grad()


def column(folder: Path, kind: str, name: str, statistic: str) -> dict[int, float]:
    table = read_series(folder, kind)
    assert table
    values = table.values[statistic][table.names.index(name)]
    return dict(zip(table.steps.tolist(), values.tolist(), strict=True))


def test_weights_gradients_moments_and_updates_are_those_of_the_step(tmp_path: Path) -> None:
    (model, optimizer), name = prepared(gpt2()), "blocks.1.mlp.fc.weight"
    monitor = Monitor(
        model, optimizer, MonitorConfig(("grad", "grad_clipped", "param", "adam", "update"), 1), tmp_path
    )
    parameter = model.get_parameter(name)
    exact: dict[str, Any] = {}
    original = optimizer.step

    def step(*rest: Any) -> None:
        assert parameter.grad is not None
        exact["grad_clipped"] = parameter.grad.clone()
        before = parameter.detach().clone()
        original(*rest)
        exact["param"] = parameter.detach().clone()
        exact["update_ratio"] = float((parameter.detach() - before).norm() / before.norm())
        exact.update({kind: optimizer.state[parameter][kind].clone() for kind in ("exp_avg", "exp_avg_sq")})

    optimizer.step = step  # type: ignore[method-assign, assignment]
    train(model, optimizer, monitor, 1)
    folder = tmp_path / "rank0"
    for kind in ("grad_clipped", "param", "exp_avg", "exp_avg_sq"):
        for statistic, of in {"norm": Tensor.norm, "max": Tensor.max, "mean": Tensor.mean}.items():
            assert column(folder, kind, name, statistic)[1] == pytest.approx(
                float(of(exact[kind])), rel=1e-5, abs=1e-12
            )
    assert column(folder, "update_ratio", name, "ratio")[1] == pytest.approx(exact["update_ratio"], rel=1e-5)
    factor = column(folder, "grad_clipped", name, "norm")[1] / column(folder, "grad_reduced", name, "norm")[1]
    assert factor < 1


def test_activations_and_gradients_join_the_micro_batches(tmp_path: Path) -> None:
    model, optimizer = prepared(gpt2())
    reference = copy.deepcopy(model)
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    reference.blocks[0].mlp.register_forward_hook(keep)
    for ids in IDS.split(2):
        (reference.loss(ids[:, :-1], ids[:, 1:]) / 2).backward()
    train(
        model,
        optimizer,
        Monitor(model, optimizer, MonitorConfig(("actv:blocks.0", "actv_grad"), 1), tmp_path),
        1,
    )
    folder = tmp_path / "rank0"
    for kind, name, values in (
        ("actv", "blocks.0.mlp.output.0", [value.detach() for value in outputs]),
        ("actv_grad", "blocks.0.mlp.output_grad.0", [value.grad for value in outputs]),
    ):
        whole = torch.cat([value for value in values if value is not None]).double().numpy()
        assert column(folder, kind, name, "std")[1] == pytest.approx(float(whole.std()), rel=1e-4)
        assert column(folder, kind, name, "norm")[1] == pytest.approx(float(np.linalg.norm(whole)), rel=1e-4)
    names = {row.name for row in read_rows(folder, "actv")}
    assert "blocks.0.mlp.input.0" in names
    assert not any(name.startswith("blocks.1") for name in names)


@pytest.mark.parametrize("recompute", [False, True])
def test_every_attention_call_of_a_module_has_a_row(recompute: bool, tmp_path: Path) -> None:
    model, optimizer = prepared(learned(recompute))
    monitor = Monitor(model, optimizer, MonitorConfig(("attention",), 1), tmp_path)
    train(model, optimizer, monitor, 2)
    rows = read_rows(tmp_path / "rank0", "attention")
    assert sorted({row.name for row in rows}) == [
        f"blocks.{layer}.attention.sdpa.{call}" for layer in range(2) for call in range(2)
    ]
    assert len(rows) == 2 * 4
    positions = np.log(np.arange(1, 9)).mean()  # of a uniform attention
    assert all(0 < row.values[0] <= positions for row in rows)
    assert rows[0].values != rows[1].values
