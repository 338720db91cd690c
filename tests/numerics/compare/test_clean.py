"""Steps that differ by correct kernels alone agree within rounding; equal steps are equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from numerics import Recorder, RecorderConfig
from numerics.compare.judge import GROWTH, REPLAY
from numerics.compare.records import read_record
from numerics.compare.replay import replayed_error
from tests.numerics.compare.small_models import (
    MODULES,
    STATISTICS,
    TENSORS,
    compared,
    growth,
    ours,
    record,
    step,
    transformers_gpt2,
)


def two_threads(model: nn.Module) -> None:
    torch.set_num_threads(2)
    try:
        step(model)
    finally:
        torch.set_num_threads(1)


def autocast(model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(model)


KERNELS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "mkldnn off": lambda: torch.backends.mkldnn.flags(enabled=False),
    "sdpa math": lambda: sdpa_kernel(SDPBackend.MATH),
}
MODES = {"modules": MODULES, "statistics": STATISTICS, "tensor": TENSORS}
MODELS = {"ours": ours, "transformers": transformers_gpt2}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_other_kernels_are_rounding_and_equal_steps_are_equal(model: str, mode: str, tmp_path: Path) -> None:
    settings, make = MODES[mode], MODELS[model]
    golden = record(tmp_path, make(), **settings)
    assert compared(record(tmp_path, make(), **settings), golden).verdict == "equal"
    others = [record(tmp_path, make(), step, kernel(), **settings) for kernel in KERNELS.values()]
    others.append(record(tmp_path, make(), two_threads, **settings))
    for other in others:
        found = compared(other, golden)
        assert found.verdict in ("equal", "rounding"), found.first
        assert growth(found) < GROWTH / 2


@pytest.mark.parametrize("mode", MODES)
def test_other_kernels_under_autocast_are_rounding(mode: str, tmp_path: Path) -> None:
    golden = record(tmp_path, ours(), autocast, **MODES[mode])
    with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
        other = record(tmp_path, ours(), autocast, **MODES[mode])
    found = compared(other, golden)
    assert found.verdict == "rounding", found.first


def recorded_errors(
    folder: Path, run: Callable[[], Any], changed: dict[str, Any] | None = None
) -> list[float]:
    recorder = Recorder(RecorderConfig(dump_path=str(folder), task="tensor", level="L1"))
    recorder.start()
    run()
    recorder.stop()
    recorder.step()
    errors = []
    for call in read_record(folder / "step0/rank0").calls.values():
        if changed:
            call.raw["input_kwargs"].update(changed)
        errors.append(replayed_error(call, call.inputs, call.outputs))
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_functions_are_near_their_float64_replay(dtype: torch.dtype, tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(generator=draws).to(dtype)

    x, weight = normal(64, 256), normal(256)
    pairs = [(normal(16, size), normal(16, size)) for size in (64, 1024, 8192)]
    targets = torch.arange(64)
    q, k, v = normal(2, 4, 64, 32), normal(2, 4, 64, 32), normal(2, 4, 64, 32)

    def run() -> None:
        for a, b in pairs:
            F.linear(a, b)
        F.layer_norm(x, (256,), weight, weight)
        F.gelu(x)
        F.softmax(x, -1)
        F.cross_entropy(x, targets)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x.sum()

    for number, around in enumerate(
        (torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH))
    ):
        with around:
            assert max(recorded_errors(tmp_path / str(number), run)) < REPLAY / 2


def test_the_other_gelu_is_far_from_its_replay(tmp_path: Path) -> None:
    x = torch.linspace(-4, 4, 1000)
    other = {"approximate": {"type": "str", "value": "tanh"}}
    assert recorded_errors(tmp_path, lambda: F.gelu(x), other)[0] > 500
