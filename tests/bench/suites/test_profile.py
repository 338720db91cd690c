"""The profile suite: the operations that count on a device, their order, and a profiled step."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from bench.cases import Shape
from bench.reference_gpt import PlainGPT
from bench.runner import case_worker
from bench.suites import profile
from bench.workers import BenchError, BenchWorker
from gpt2.config.config import ANY_TARGET, TargetConfig
from gpt2.hardware import attention_kernels, resolve
from gpt2.model.transformer import GPT2
from gpt2.system.errors import UserError
from tests.bench.sessions import SHAPE, run_small, saved


def profiled(**seconds: float) -> dict[str, Any]:
    rows = [{"name": name, "seconds": value, "calls": 1.0} for name, value in seconds.items()]
    return {"step_seconds": 1.5, "page_faults": 1234, "operations": rows}


def test_operations_are_listed_by_their_largest_share_of_any_case() -> None:
    lines = str(
        profile.table(SHAPE, {"plain": profiled(mm=0.2, sqrt=0.8), "B": profiled(mm=0.9, gelu=0.1)})
    ).splitlines()[1:]
    assert [line.split()[0] for line in lines[1:4]] == ["mm", "sqrt", "gelu"]
    assert lines[1].split()[1:] == ["200", "(20.0%)", "900", "(90.0%)"]
    assert lines[2].split()[1:] == ["800", "(80.0%)", "-"]
    assert lines[-1].split()[-2:] == ["1,234", "1,234"]


# --- operations


def event(number: int, name: str, start: int, end: int, device: Any, **more: Any) -> FunctionEvent:
    return FunctionEvent(number, name, 1, start, end, device_type=device, use_device="cuda", stack=[], **more)


def averages() -> Any:
    """Return torch's averages of a GPU step: launching operations, their kernels, a copy and two annotations."""
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        event(1, "aten::mm", 0, 5, cpu),
        event(2, "aten::mm", 5, 9, cpu),
        event(3, "gemm", 10, 40, gpu),
        event(4, "gemm", 40, 60, gpu),
        event(5, "Memcpy HtoD", 60, 64, gpu),
        event(6, "ProfilerStep#1", 0, 70, gpu, is_user_annotation=True),
        event(7, "ProfilerStep#1", 0, 70, cpu, is_user_annotation=True),
    ]
    events[0].append_kernel("gemm", 0, 30.0)
    events[1].append_kernel("gemm", 0, 20.0)
    listed = EventList(events, use_device="cuda")
    listed._tree_built = True
    return listed.key_averages()


def test_on_a_gpu_each_kernel_time_counts_once_and_the_sum_is_the_total_of_torch() -> None:
    rows = profile.operations(averages(), gpu=True, steps=2)
    assert [(row["name"], row["calls"]) for row in rows] == [("gemm", 1.0), ("Memcpy HtoD", 0.5)]
    assert [row["seconds"] for row in rows] == pytest.approx([25e-6, 2e-6])
    assert "time total: 54.000us" in averages().table().rpartition("Self CUDA ")[2]


def test_on_a_cpu_the_self_times_of_operations_count() -> None:
    rows = profile.operations(averages(), gpu=False, steps=1)
    assert ("aten::mm", pytest.approx(9e-6)) in [(row["name"], row["seconds"]) for row in rows]
    assert not {"gemm", "Memcpy HtoD"} & {row["name"] for row in rows}


# --- a step


@pytest.mark.usefixtures("workers_here")
def test_a_step_is_profiled_by_its_operations() -> None:
    for case in ("plain", "RALEARN"):
        with case_worker(SHAPE, case, 4) as worker:
            found = worker.call(profile.profile_case, SHAPE, case, 4, 1)
        names = {row["name"] for row in found["operations"]}
        assert any("mm" in name for name in names)
        assert ("aten::_log_softmax" in names) == (case == "plain")
        assert found["step_seconds"] > 0


@pytest.mark.parametrize(("case", "usual"), [("plain", True), ("B", False)])
def test_only_our_step_is_restricted_to_the_fused_kernels(
    case: str, usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[bool] = []
    owner, name = (PlainGPT, "forward") if case == "plain" else (GPT2, "hidden")
    forward = getattr(owner, name)

    def watched(*arguments: Any) -> Any:
        allowed.append(torch.backends.cuda.math_sdp_enabled())
        return forward(*arguments)

    monkeypatch.setattr(owner, name, watched)
    resolved = resolve.resolve(TargetConfig("cpu", "float32", False, 0, "auto", False))
    monkeypatch.setattr(attention_kernels, "prepare_device", lambda config, model: resolved)
    profile.profile_case(SHAPE, case, 4, 1)
    assert set(allowed) == {usual}


# --- the suite


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the suite run on a simulated GPU."""
    resolved = dataclasses.replace(resolve.resolve(ANY_TARGET), device="cuda:0")
    monkeypatch.setattr(resolve, "resolve", lambda config: resolved)


def replace_calls(monkeypatch: pytest.MonkeyPatch, profile_case: Callable[..., dict[str, Any]]) -> None:
    """Let `profile_case` stand in for what a worker calls."""
    monkeypatch.setattr(BenchWorker, "call", lambda worker, function, *key, limit_seconds: profile_case(*key))


def test_a_case_that_fails_is_skipped_and_the_others_are_saved(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measure(shape: Shape, case: str, micro: int, steps: int) -> dict[str, Any]:
        if asked:
            assert saved(profile.SUITE)["complete"] is False
        asked.append((case, micro))
        if case == "B":
            raise BenchError("B: out of memory")
        return profiled(mm=1.0)

    replace_calls(monkeypatch, measure)
    found = run_small(profile.SUITE, tmp_path, monkeypatch)
    assert asked == [(case, 32) for case in profile.CASES]  # not B's 64, nor the plain case's 12
    shown = capsys.readouterr().out
    assert "skipped: B: out of memory" in shown
    assert "an optimizer step of 32 x 6 sequences" in shown
    assert (found["complete"], found["micro"], [*found["cases"]]) == (True, 32, ["plain", "RALEARN"])


def test_where_no_case_can_be_profiled_the_suite_fails(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> dict[str, Any]:
        raise BenchError("out of memory")

    replace_calls(monkeypatch, fail)
    with pytest.raises(UserError, match="no case could be profiled"):
        run_small(profile.SUITE, tmp_path, monkeypatch)
    assert not [*tmp_path.rglob("*.json")]
