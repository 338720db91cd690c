"""Run the project on a stand-in for torch_npu (tests/fixtures/npu), whose device "npu" is computed by the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt2.hardware import ascend, torch_devices
from tests.faults.workplace import SETTINGS, STUDY
from tests.small_runs import write_texts

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests/fixtures/npu"


def run_with_npu(*command: str, cwd: Path = ROOT, **extra: str) -> str:
    """Run Python with the stand-in installed. Returns standard output."""
    path = os.pathsep.join([str(FAKE), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RA_DETECTED": "cpu"} | extra
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STEPS = """
import json, torch
from gpt2.config.batch import plan_batch
from gpt2.config.config import ANY_TARGET, ModelConfig, OptimizerConfig
from gpt2.hardware.attention_kernels import attention_context, prepare_device
from gpt2.model import cpu_linear, loss
from gpt2.train.clocks import device_synchroniser
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.step import Stepper

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
torch.manual_seed(7)
print(json.dumps({"steps": found, "calls": sorted(set(torch_npu.calls)), "backend": npu.attention_backend,
                  "device": npu.device, "dtype": npu.dtype, "row": npu.target.name, "note": npu.note,
                  "seed": torch.npu.initial_seed(), "driver": npu.driver,
                  "precision": torch.get_float32_matmul_precision(),
                  "accelerator": str(torch.accelerator.current_accelerator(check_available=True))}))
"""


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_with_npu("-c", STEPS).splitlines()[-1])
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


def test_a_study_trains_on_the_npu_and_records_it(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    values = SETTINGS | {"DATASET_FILES": str(texts / "*.txt"), "GPT2_MAX_ITERS": "12"}
    assignments = [f"CONFIG_{name}={value}" for name, value in values.items()]
    from tests.checkout import link_project

    link_project(tmp_path)
    run_with_npu("-m", "scripts.kconfig", "defconfig", STUDY, *assignments, cwd=tmp_path)
    run_with_npu("-m", "scripts.study", cwd=tmp_path)
    record = json.loads((tmp_path / "results" / STUDY / "runs/B0/run.json").read_text())
    assert record["status"] == "finished"
    target = record["target"]
    assert (target["name"], target["device"], target["dtype"]) == ("910b", "Ascend910B3", "bfloat16")
    assert (target["attention_backend"], target["memory_bytes"]) == ("fusion", int(60.97 * 2**30))
    assert target["driver"] == "torch_npu 2.13.0.post1, CANN 9.1.0"
    assert 0 < record["memory"]["peak_allocated_bytes"] < 2**27


def test_an_npu_without_a_fused_kernel_is_refused() -> None:
    script = """
from gpt2.config.config import ANY_TARGET, ModelConfig
from gpt2.hardware.attention_kernels import prepare_device
from gpt2.hardware.gpu_specs import TargetError
try:
    prepare_device(ANY_TARGET, ModelConfig("test", 2, 2, 32, 16, 0.0, 50, 64))
except TargetError as error:
    print(error)
"""
    said = run_with_npu("-c", script, FAKE_NPU_ATTENTION="math")
    assert said.startswith(
        "Ascend910B3: no fused attention kernel supports 2 heads of 16 in bfloat16 (torch: it took"
    )
    assert "fix: use an Ascend 910B or newer" in said


def test_a_torch_npu_without_cann_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise ImportError("libascend_hal.so: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(torch_devices, "load_torch_npu", missing)
    found = torch_devices.list_torch_devices()
    assert found.gpus == ()
    assert found.kind == "cpu"
    assert found.trouble.startswith("torch_npu cannot be loaded: libascend_hal.so")


def test_without_torch_npu_nothing_is_loaded() -> None:
    assert not ascend.is_torch_npu_installed()
    assert ascend.load_torch_npu() is None
    assert "torch_npu" not in sys.modules
