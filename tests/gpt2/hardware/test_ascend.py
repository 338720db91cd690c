"""Run the project on a stand-in for torch_npu (tests/fixtures/npu), whose device "npu" is computed by the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.hardware import ascend, torch_devices
from gpt2.hardware.gpu_specs import GIB, TARGETS
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.system import ranks
from study.memory.micro_batch import MemoryPlanError, require_free
from tests.small_runs import outcome

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests/fixtures/npu"


def run_with_npu(*command: str) -> str:
    """Run Python with the stand-in installed. Returns standard output."""
    path = os.pathsep.join([str(FAKE), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **TARGETS["910b"].environment}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


STEPS = """
import dataclasses, functools, json, os, sys, torch
from pathlib import Path
from gpt2.config.batch import plan_batch
from gpt2.config.config import ANY_TARGET, ModelConfig, OptimizerConfig
from gpt2.hardware import resolve
from gpt2.hardware.attention_kernels import attention_context, prepare_device
from gpt2.hardware.gpu_specs import TargetError
from gpt2.model import cpu_linear, loss
from gpt2.train.clocks import ClockTimer, device_synchroniser, step_timer
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.step import Stepper
from tests.small_runs import StopAfter, configuration, outcome, same, start, write_texts

model = ModelConfig("test", 2, 2, 32, 16, 0.0, 50, 64)
optimizer = OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, 1.0, "cosine", 0.2)
npu = prepare_device(ANY_TARGET, model)
import torch_npu
cpu_linear.CPU_KERNEL_DEVICES, loss.CHUNK_ROWS["cpu"] = set(), loss.CHUNK_ROWS["card"]  # the same operations
ids = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(0))

def train(device, dtype, micro):
    stepper = Stepper(model, optimizer, plan_batch(4, micro, 1, 16), seed=0, device=device, dtype=dtype, compile=False,
                      parts=None)
    meter = PeakMeter(device)
    for k in range(3):
        result = stepper.step(ids.to(device), k, 3, meter)
    weights = [p.detach().cpu() for p in stepper.model.parameters()]
    assert {p.device.type for p in stepper.model.parameters()} == {device.partition(":")[0]}
    return result, weights, meter

def compare(dtype, micro):
    with attention_context(npu):
        ours, weights, meter = train(npu.device, dtype, micro)
    theirs, exact, _ = train("cpu", dtype, micro)
    return {"same": all(map(torch.equal, weights, exact)), "losses": [ours.loss, theirs.loss],
            "norms": [ours.gradient_norm, theirs.gradient_norm], "phases": meter.by_phase, "peaks": meter.peaks()}

found = {name: compare(*name.split()[:1], int(name.split()[1])) for name in ("float32 4", "float32 2", "bfloat16 4")}
device_synchroniser(npu.device)()
assert isinstance(step_timer(npu.device, 1), ClockTimer)  # its events have no times
torch.manual_seed(7)

folder = Path(sys.argv[1])
resolve.list_in_child = functools.cache(resolve.list_in_child)  # a process that loads torch
short = configuration(write_texts(folder / "texts"), 8)
short = dataclasses.replace(short, target=dataclasses.replace(ANY_TARGET, dtype="float32"))
with attention_context(npu):
    start(folder / "whole", short).train()
    stopped = start(folder / "parts", short, stop=StopAfter(9)).train()
    continued = start(folder / "parts", short).train()
record = json.loads((folder / "whole/run.json").read_text())

os.environ["FAKE_NPU_ATTENTION"] = "math"
try:
    prepare_device(ANY_TARGET, model)
except TargetError as error:
    refusal = str(error)
print(json.dumps({
    "refusal": refusal, "stopped": stopped, "continued": continued, "record": record, "steps": found,
    "equal": same(outcome(folder / "whole"), outcome(folder / "parts")), "calls": sorted(set(torch_npu.calls)),
    "backend": npu.attention_backend, "device": npu.device, "dtype": npu.dtype, "row": npu.target.name,
    "seed": torch.npu.initial_seed(), "driver": npu.driver, "precision": torch.get_float32_matmul_precision(),
    "accelerator": str(torch.accelerator.current_accelerator(check_available=True)),
}))
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("npu")
    found: dict[str, Any] = json.loads(run_with_npu("-c", STEPS, str(folder)).splitlines()[-1])
    found["folder"] = folder
    return found


def test_the_npu_is_found_when_the_process_starts(steps: dict[str, Any]) -> None:
    names = ("accelerator", "device", "row", "dtype", "backend", "driver")
    assert [steps[name] for name in names] == [
        "npu", "npu:0", "910b", "bfloat16", "fusion", "torch_npu 2.13.0.post1, CANN 9.1.0",
    ]  # fmt: skip
    assert steps["precision"] == "highest"
    assert {"set_device", "empty_cache", "synchronize", "manual_seed_all"} <= set(steps["calls"])
    assert steps["seed"] == 7


@pytest.mark.parametrize("case", ["float32 4", "float32 2", "bfloat16 4"])
def test_steps_on_the_npu_have_the_weights_of_the_cpu_to_the_bit(steps: dict[str, Any], case: str) -> None:
    found = steps["steps"][case]
    assert found["same"]
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6)
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)


def test_peak_memory_comes_from_the_allocator_of_the_npu(steps: dict[str, Any]) -> None:
    found = steps["steps"]["float32 4"]
    assert set(found["phases"]) == {"forward", "backward", "optimizer"}
    assert found["peaks"]["allocated"] == max(found["phases"].values()) > 0
    assert found["phases"]["optimizer"] < found["phases"]["backward"]
    assert "reset_peak_memory_stats" in steps["calls"]


def test_a_run_on_the_npu_is_recorded_and_continues_to_the_same_numbers(steps: dict[str, Any]) -> None:
    assert steps["stopped"] == "interrupted"
    assert steps["continued"] == "finished"
    assert steps["equal"]
    # another machine has no torch_npu
    assert "torch_npu" not in sys.modules
    state, _, losses = outcome(steps["folder"] / "parts")
    assert {tensor.device.type for tensor in state["model"].values()} == {"cpu"}
    assert len(losses) == 8
    target, memory = steps["record"]["target"], steps["record"]["memory"]
    assert (target["name"], target["device"], target["dtype"]) == ("910b", "Ascend910B3", "float32")
    observed = target["attention_backend"].split(" and ")  # in the stand-in, the CPU's kernel too
    assert (observed, target["memory_bytes"]) == (["flash", "fusion"], int(60.97 * 2**30))
    assert target["driver"] == "torch_npu 2.13.0.post1, CANN 9.1.0"
    assert 0 < memory["peak_allocated_bytes"] < 2**24
    assert steps["record"]["environment"]["variables"]["INF_NAN_MODE_ENABLE"] == "1"


def test_an_npu_without_a_fused_kernel_is_refused(steps: dict[str, Any]) -> None:
    said = steps["refusal"]
    assert said.startswith(
        "Ascend910B3: no fused attention kernel supports 2 heads of 16 in bfloat16 (torch: it took"
    )
    assert "fix: use an Ascend 910B or newer" in said


def test_a_torch_npu_without_cann_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("libascend_hal.so: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ascend, "is_torch_npu_installed", lambda: True)
    monkeypatch.setattr(ascend.importlib, "import_module", missing)
    found = torch_devices.list_torch_devices()
    assert found.gpus == ()
    assert found.kind == "cpu"
    assert found.trouble.startswith("torch_npu cannot be loaded: libascend_hal.so")
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # torch_npu is not for such a build
    assert ascend.load_torch_npu() == (None, "")


def test_without_torch_npu_nothing_is_loaded() -> None:
    assert not ascend.is_torch_npu_installed()
    assert ascend.load_torch_npu() == (None, "")
    assert "torch_npu" not in sys.modules


def test_the_ranks_of_npus_communicate_through_hccl(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    for name in ranks.VARIABLES:
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(ranks, "_joined", {"rank": 0, "world": 1})
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "init_process_group", lambda backend, timeout: chosen.append(backend))
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 1)
    for device_type in ("npu", "cuda", "cpu"):
        ranks.join(device_type, 60)
    assert chosen == ["cpu:gloo,npu:hccl", "cpu:gloo,cuda:nccl", "gloo"]


def test_too_little_free_memory_names_the_tool_of_the_npu() -> None:
    row = TARGETS["910b"]
    npu = ResolvedTarget(row, "npu:0", "Ascend910B3", 60 * GIB, "bfloat16", "fusion", None, None)
    with pytest.raises(
        MemoryPlanError, match=r"Ascend910B3: 1.0 of 60.0 GiB are free.*\(npu-smi info lists them\)"
    ):
        require_free(npu, 2 * GIB, GIB)
