"""Clipping and the optimizer within a record: what they compute of gradients is explained by the gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from numerics import Recorder, RecorderConfig
from numerics.compare.compare_records import Comparison, compare_records

MODES = {
    "checksums": {"level": "mix", "summary_mode": "md5"},
    "values": {"level": "mix", "task": "tensor"},
    "functions": {"level": "L1", "task": "tensor"},
}
Build = Callable[[], tuple[nn.Module, Callable[[], object]]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def record(folder: Path, build: Build, mode: str, other_kernels: bool) -> Path:
    torch.manual_seed(3)
    model, step = build()
    recorder = Recorder(RecorderConfig(dump_path=str(folder), **MODES[mode]))
    torch.set_num_threads(1 if other_kernels else 2)
    with torch.backends.mkldnn.flags(enabled=not other_kernels):
        for _ in range(2 if mode == "functions" else 1):
            recorder.start(model)
            step()
            recorder.stop()
            recorder.step()
    return folder


def compared(folder: Path, build: Build, mode: str, target: Build | None = None) -> Comparison:
    golden = record(folder / "golden", build, mode, False)
    return compare_records(record(folder / "target", target or build, mode, True), golden)


def test_an_update_is_judged_where_only_functions_are_recorded(tmp_path: Path) -> None:
    """The update of the last layer is wrong by 10 %, outside of the record."""

    def build(factor: float) -> tuple[nn.Module, Callable[[], object]]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        x = torch.randn(32, 64)
        calls = []

        def step() -> None:
            if calls:
                for number, one in enumerate(model.parameters()):
                    with torch._C.DisableTorchFunction():
                        one.data.sub_(0.1 * (factor if number == 2 else 1.0) * one.grad)
                        one.grad = None
            calls.append(model(x).square().mean().backward())

        return model, step

    right = compared(tmp_path / "right", lambda: build(1.0), "functions")
    assert right.verdict in ("rounding", "equal"), right.first
    wrong = compared(tmp_path / "wrong", lambda: build(1.0), "functions", lambda: build(1.1))
    assert wrong.first is not None
    assert (wrong.first.step, wrong.first.evidence) == ("step1/rank0", "update")


def test_memory_that_a_function_overwrites_is_no_difference(tmp_path: Path) -> None:
    """scatter_ fills new memory in pack_padded_sequence. Its first argument is then what the memory held before."""

    def build() -> tuple[nn.Module, Callable[[], object]]:
        model, places = nn.Linear(4, 4), torch.arange(6)

        def step() -> None:
            order = torch.empty(6, dtype=torch.int64).scatter_(0, places, places)
            model(torch.ones(6, 4)[order]).sum().backward()

        return model, step

    golden, target = (record(tmp_path / name, build, "checksums", False) for name in ("golden", "target"))
    for folder, held in ((golden, 5.0), (target, 7.0)):
        dump = folder / "step0/rank0/dump.json"
        content = json.loads(dump.read_text())
        content["data"]["Tensor.scatter_.0.forward"]["input_args"][0] |= {"Max": held, "md5": f"{held}"}
        dump.write_text(json.dumps(content))
    assert compare_records(target, golden).verdict == "equal"
