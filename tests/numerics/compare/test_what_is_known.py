"""A conclusion names no more than the record shows: gradients dropped or scaled, custom functions, hidden arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from numerics import Recorder, RecorderConfig
from numerics.compare.run import Comparison, compare_records
from numerics.compare.summary import summary


class Scaled(torch.autograd.Function):
    """2 x, whose gradient has a factor and relative noise of the rounding of a dtype."""

    factor = 1.0
    noise = 0.0
    after = 2  # the layer

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        noise = Scaled.noise * torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1))
        return gradient * 2 * (Scaled.factor + noise)


class Model(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self):
            x = layer(x)
            if index == Scaled.after:
                x = Scaled.apply(x)
        return x


def record(folder: Path, drop: int | None, most: float, eps: float, bf16: bool, **mode: Any) -> Path:
    torch.manual_seed(0)
    model = Model(*(nn.Linear(32, 32) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=eps)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    recorder = Recorder(RecorderConfig(dump_path=str(folder), **mode))
    recorder.start(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = F.mse_loss(model(x).float(), y)
    loss.backward()
    if drop is not None:
        list(model.parameters())[drop].grad = None
    nn.utils.clip_grad_norm_(model.parameters(), most)
    optimizer.step()
    recorder.stop()
    recorder.step()
    return folder


def compared(folder: Path, golden: dict[str, Any], target: dict[str, Any], **mode: Any) -> Comparison:
    base: dict[str, Any] = {"drop": None, "most": 1e-3, "eps": 1e-8, "bf16": False, **mode}
    golden_folder = record(folder / "golden", **(base | golden))
    return compare_records(record(folder / "target", **(base | target)), golden_folder)


@pytest.mark.parametrize(
    "mode", [{"level": "L0"}, {"level": "mix", "summary_mode": "md5"}], ids=["L0", "mix"]
)
def test_a_gradient_dropped_before_clipping_is_missing(mode: dict[str, Any], tmp_path: Path) -> None:
    found = compared(tmp_path, {}, {"drop": 4}, **mode).first
    assert found is not None
    assert (found[1].cause, found[1].module) == ("missing", "2")
    assert "gradient weight" in found[1].what[0]


def test_gradients_that_are_scaled_alike_are_called_so(tmp_path: Path) -> None:
    found = compared(tmp_path, {}, {"most": 3e-3}, level="L0").first
    assert found is not None
    assert "each is 3 times the golden one: their scale, average or clipping" in found[1].why


def test_a_custom_function_is_between_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base: dict[str, Any] = {
        "drop": None,
        "most": 1e9,
        "eps": 1e-8,
        "bf16": False,
        "level": "L1",
    }
    golden = record(tmp_path / "golden", **base)
    monkeypatch.setattr(Scaled, "factor", 1.1)
    found = compare_records(record(tmp_path / "target", **base), golden).first
    assert found is not None
    assert found[1].cause == "between"
    assert found[1].name == "between Functional.linear.3.backward and Functional.linear.2.backward"


@pytest.mark.parametrize("eps", [1e-4, 1e-7])
def test_an_argument_that_rounding_may_hide_is_not_called_rounding(
    eps: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eps of Adam behind a backward in bfloat16 of other kernels, with checksums."""
    base: dict[str, Any] = {"drop": None, "most": 1.0, "bf16": True, "level": "mix", "summary_mode": "md5"}
    monkeypatch.setattr(Scaled, "after", 4)
    golden = record(tmp_path / "golden", eps=1e-8, **base)
    monkeypatch.setattr(Scaled, "noise", 2**-8)
    found = compare_records(record(tmp_path / "target", eps=eps, **base), golden)
    assert found.verdict_text == "rounding in what could be compared"
    assert f"{eps:g} against 1e-08" in found.reservation
    assert any("verdict: rounding in what could be compared" in line for line in summary(found))
