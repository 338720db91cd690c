"""Pairs that differ by correct kernels agree within rounding; equal steps are equal."""

from __future__ import annotations

import contextlib
import platform
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
from numerics.compare.run import compare_records
from tests.numerics.corpus.clean import CLEAN, answer, every_kernel, threads
from tests.numerics.corpus.corpus import MODES, FaultCorpus, pinned
from tests.numerics.corpus.faults import ADAMW, CHECKSUMS, MODULES, VALUES, PlantedFault
from tests.numerics.corpus.models import OURS, record


def mode_of(place: int, pair: PlantedFault, kind: str) -> str:
    """Return the mode of one pair of our model: values and checksums in turn. `make bench SUITE=numerics` has each."""
    if kind != OURS or pair.golden.optimizer:
        return MODULES
    return CHECKSUMS if place % 2 or pair.target.settings or pair.target.other_process else VALUES


CASES = [
    pytest.param(pair, kind, mode_of(place, pair, kind), id=f"{pair.name}, {kind}")
    for place, pair in enumerate(CLEAN)
    for kind in pair.kinds
    if kind == OURS or not pair.target.other_process
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> FaultCorpus:
    return FaultCorpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(("pair", "kind", "mode"), CASES)
def test_a_clean_pair_is_no_divergence(pair: PlantedFault, kind: str, mode: str, corpus: FaultCorpus) -> None:
    found = answer(corpus, pair, kind, mode)
    assert found.right, found.found
    if platform.machine() == "x86_64":  # elsewhere other kernels round
        assert found.line in pinned()
    most = (
        GROWTH if "separate" in pair.name else GROWTH / 2
    )  # three partial gradients are added, which cancel
    assert found.growth < most


def test_a_gradient_of_zero_but_for_rounding_is_no_divergence(tmp_path: Path) -> None:
    """A bias before a BatchNorm has no effect; AdamW turns the rounding of its gradient into steps of any sign."""

    def recorded(around: AbstractContextManager[Any], **settings: Any) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(3, 16, 3), nn.BatchNorm1d(16), nn.GELU(), nn.Conv1d(16, 3, 1))
        x = torch.randn(8, 3, 64)

        def run(model: nn.Module) -> None:
            torch.autograd.backward(model(x).square().mean())

        return record(tmp_path, model, run, around, ADAMW, 3, **settings)

    no_mkldnn = torch.backends.mkldnn.flags(enabled=False)
    for mode, around in ((CHECKSUMS, no_mkldnn), (VALUES, threads(2)), (MODULES, every_kernel())):
        golden = recorded(contextlib.nullcontext(), **MODES[mode])
        found = compare_records(recorded(around, **MODES[mode]), golden)
        assert found.verdict != "diverges", found.first


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
