"""Run the project on a stand-in for torch's mps (tests/fixtures/mps), whose tensors are computed by the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import link_project
from tests.compilers import NO_COMPILER
from tests.small_runs import outcome, write_texts

ROOT = Path(__file__).parents[3]
MAC = ROOT / "tests/fixtures/mps"
pytestmark = NO_COMPILER
STEPS = """
import contextlib, dataclasses, io, json, os, platform, sys, torch
from pathlib import Path
from torch.nn.attention import SDPBackend, sdpa_kernel
from gpt2.config.batch import plan_batch
from gpt2.config.config import ANY_TARGET, ModelConfig, OptimizerConfig
from gpt2.hardware import mps
from gpt2.hardware.attention_kernels import attention_context, prepare_device
from gpt2.hardware.resolve import resolve
from gpt2.model import cpu_linear, loss
from gpt2.system.errors import run_command
from gpt2.train.clocks import ClockTimer, device_synchroniser, step_timer
from gpt2.train.peak_memory import PeakMeter
from gpt2.train.step import Stepper
from tests.small_runs import StopAfter, configuration, outcome, same, start, write_texts

model = ModelConfig("test", 2, 2, 32, 16, 0.0, 50, 64)
optimizer = OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, 1.0, "cosine", 0.2)
mac = prepare_device(ANY_TARGET, model)
import mps_standin
cpu_linear.CPU_KERNEL_DEVICES, loss.CHUNK_ROWS["cpu"] = set(), loss.CHUNK_ROWS["card"]  # the same operations
ids = torch.randint(0, 50, (4, 17), generator=torch.Generator().manual_seed(0))

def refused(make):
    try:
        make()
    except TypeError as error:
        return str(error)

x = torch.ones(2).to("mps")
doubles = [refused(make) for make in (
    x.double, lambda: torch.zeros(2, device="mps", dtype=torch.float64), lambda: x.to("cpu", torch.float64),
    lambda: torch.ones(2).double().to("mps"), lambda: torch.ones(2).to("mps", torch.float64))]

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
    with attention_context(mac):
        ours, weights, meter = train(mac.device, dtype, micro)
    with sdpa_kernel([SDPBackend.MATH]):
        theirs, exact, _ = train("cpu", dtype, micro)
    return {"same": all(map(torch.equal, weights, exact)), "losses": [ours.loss, theirs.loss],
            "norms": [ours.gradient_norm, theirs.gradient_norm], "phases": meter.by_phase, "peaks": meter.peaks()}

found = {name: compare(*name.split()[:1], int(name.split()[1])) for name in ("float32 4", "float32 2", "bfloat16 4")}
before = mps_standin.library.synchronisations()
device_synchroniser(mac.device)()
timer = step_timer(mac.device, 1)
timer.mark()
synchronised = mps_standin.library.synchronisations() - before
torch.manual_seed(7)
state = torch.mps.get_rng_state()
drawn = torch.randn(3, generator=torch.mps._get_default_mps_generator())
torch.mps.set_rng_state(state)
again = torch.randn(3, generator=torch.mps._get_default_mps_generator())

folder = Path(sys.argv[1])
short = configuration(write_texts(folder / "texts"), 8)
short = dataclasses.replace(short, target=dataclasses.replace(ANY_TARGET, dtype="float32"))
with attention_context(mac):
    start(folder / "whole", short).train()
    stopped = start(folder / "parts", short, stop=StopAfter(9)).train()
    continued = start(folder / "parts", short).train()

shorter = dataclasses.replace(configuration(folder / "texts", 3), target=ANY_TARGET)

def lacking(name, missing=(), on_cpu=(), **variables):
    # train without kernels of these operations, as in a process of its own
    mps_standin.MISSING, mps_standin.ON_CPU, mps_standin.FALLBACK = set(missing), set(on_cpu), bool(variables)
    mps_standin.warned.clear()
    torch.set_warn_always(False)
    mps.fallback_log.cache_clear()
    os.environ |= variables
    status, stderr = 0, io.TextIOWrapper(io.BytesIO())

    def main():
        with attention_context(prepare_device(ANY_TARGET, shorter.model)):
            start(folder / name, shorter).train()

    with contextlib.redirect_stderr(stderr):
        try:
            run_command(main)
        except SystemExit as end:
            status = end.code
    record = json.loads((folder / name / "run.json").read_text())
    stderr.seek(0)
    return {"status": status, "last": (stderr.read().splitlines() or [""])[-1], "record": record}

gelu, norm = "aten::gelu", "aten::native_layer_norm"
lacks = {
    "always": lacking("always", on_cpu=[gelu]),
    "error": lacking("error", missing=[gelu]),
    "fallback": lacking("fallback", missing=[norm, gelu], PYTORCH_ENABLE_MPS_FALLBACK="1"),
}
os.environ["FAKE_MACOS"] = "13"
platform.mac_ver = lambda: ("13.1", ("", "", ""), "arm64")
for cached in (torch.backends.mps.is_available, torch.backends.mps.is_macos_or_newer):
    cached.cache_clear()
old = resolve(ANY_TARGET)
print(json.dumps({
    "lacks": lacks, "old": [old.device, old.note], "doubles": doubles, "stopped": stopped,
    "continued": continued, "steps": found, "synchronised": synchronised,
    "record": json.loads((folder / "whole/run.json").read_text()), "clock": isinstance(timer, ClockTimer),
    "equal": same(outcome(folder / "whole"), outcome(folder / "parts")), "random": torch.equal(drawn, again),
    "backend": mac.attention_backend, "device": mac.device, "dtype": mac.dtype, "row": mac.target.name,
    "driver": mac.driver, "note": mac.note, "precision": torch.get_float32_matmul_precision(),
}))
"""
STUDY = ("CONFIG_VARIANTS=B", "CONFIG_HELLASWAG=n", "CONFIG_GPT2_MAX_ITERS=4", "CONFIG_EVAL_TOKENS=256")
STUDY_AND_MEMORY = """
import sys
from scripts import memory, study
from study.runner.study import Study

Study.admit = lambda study: None  # its processes examine on the CPU
assert study.main() == 0
sys.argv[1:] = ["--target", "mps", "--variants", "B"]
assert memory.main() == 0
"""


def on_a_mac(folder: Path, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the stand-in."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "RA_DETECTED")}
    env |= {"PYTHONPATH": os.pathsep.join([str(MAC), str(ROOT)]), "OMP_NUM_THREADS": "1"} | settings
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, cwd=folder)


def answers(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mps")
    found: dict[str, Any] = answers(on_a_mac(ROOT, "-c", STEPS, str(folder)))
    found["folder"] = folder
    return found


def test_the_device_is_found_when_the_process_starts(steps: dict[str, Any]) -> None:
    names = ("device", "row", "dtype", "backend", "driver", "precision")
    assert [steps[name] for name in names] == ["mps:0", "mps", "float32", "math", "macOS 15.1", "highest"]
    assert "attention stores T x T scores" in steps["note"]


def test_float64_on_the_device_would_be_an_error(steps: dict[str, Any]) -> None:
    assert len(steps["doubles"]) == 5
    assert all("the MPS framework doesn't support float64" in text for text in steps["doubles"])


@pytest.mark.parametrize("case", ["float32 4", "float32 2", "bfloat16 4"])
def test_steps_have_the_weights_of_the_cpu_to_the_bit(steps: dict[str, Any], case: str) -> None:
    found = steps["steps"][case]
    assert found["same"]
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-6)
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)


def test_the_peak_is_the_largest_sample_of_the_phases(steps: dict[str, Any]) -> None:
    found = steps["steps"]["float32 4"]
    assert set(found["phases"]) == {"forward", "backward", "optimizer"}
    assert found["peaks"]["allocated"] == max(found["phases"].values()) > found["phases"]["optimizer"] > 0
    assert found["peaks"]["reserved"] == found["peaks"]["allocated"] + 3 * 2**20  # the driver's


def test_steps_are_timed_by_the_clock_after_the_device_finished(steps: dict[str, Any]) -> None:
    assert steps["clock"]
    assert steps["synchronised"] == 2
    assert steps["random"]


def test_a_run_is_recorded_and_continues_to_the_same_numbers(steps: dict[str, Any]) -> None:
    assert (steps["stopped"], steps["continued"], steps["equal"]) == ("interrupted", "finished", True)
    state, _, losses = outcome(steps["folder"] / "parts")
    assert {tensor.device.type for tensor in state["model"].values()} == {"cpu"}
    assert len(losses) == 8
    record = steps["record"]
    target, memory = record["target"], record["memory"]
    assert (target["name"], target["device"], target["dtype"]) == ("mps", "Apple M4", "float32")
    assert (target["attention_backend"], target["memory_bytes"]) == ("math", 32 * 2**30 // 3)
    assert 0 < memory["peak_allocated_bytes"] < memory["peak_reserved_bytes"] < 2**24
    assert memory["peak_allocated_bytes"] >= memory["by_phase"]["forward"] > 0
    assert any("largest sample at the ends of phases" in note for note in record["notes"])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    link_project(folder)
    texts = f"CONFIG_DATASET_FILES={write_texts(folder / 'texts')}/*.txt"
    arguments = (*STUDY, "CONFIG_TARGET_AUTO=y", texts)
    defconfig = on_a_mac(folder, "-m", "scripts.kconfig", "defconfig", "gpt2-ra-ablation-smoke", *arguments)
    assert defconfig.returncode == 0, defconfig.stderr
    assert "found Apple's GPU: at the scale of a CPU study" in defconfig.stdout
    return folder


def test_a_study_trains_reports_and_predicts_its_memory(study: Path) -> None:
    done = on_a_mac(study, "-c", STUDY_AND_MEMORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on Apple M4, float32 (memory is Metal's recommended maximum" in done.stdout
    results = study / "results/gpt2-ra-ablation-smoke"
    assert "on Apple M4, float32" in (results / "report.md").read_text()
    record = json.loads((results / "runs/B0/run.json").read_text())
    assert record["status"] == "finished"
    assert 0 < record["memory"]["peak_allocated_bytes"] < record["memory"]["predicted_bytes"]
    assert "PYTORCH_ENABLE_MPS_FALLBACK" not in record["environment"]["variables"]
    assert "mps (Apple M4, 10.67 GiB, float32): GPT-2 mini" in done.stdout


def test_an_operation_without_a_kernel_ends_the_run_with_the_fix(steps: dict[str, Any]) -> None:
    found = steps["lacks"]["error"]
    assert found["status"] == 1
    assert found["last"].startswith("error: torch has no aten::gelu for mps; fix: PYTORCH_ENABLE")
    assert found["record"]["error"].startswith("torch has no aten::gelu for mps")


def test_operations_that_fall_back_to_the_cpu_are_named_in_the_record(steps: dict[str, Any]) -> None:
    found = steps["lacks"]["fallback"]
    assert found["status"] == 0, found["last"]
    assert found["record"]["notes"][-1].endswith(
        "(PYTORCH_ENABLE_MPS_FALLBACK=1): aten::gelu, aten::native_layer_norm"
    )
    assert found["record"]["environment"]["variables"]["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"


def test_an_operation_that_torch_always_computes_on_the_cpu_is_named_too(steps: dict[str, Any]) -> None:
    found = steps["lacks"]["always"]
    assert found["status"] == 0, found["last"]
    note = "operations without a kernel for mps that torch computed on the CPU: aten::gelu"
    assert found["record"]["notes"][-1] == note


def test_before_macos_14_the_cpu_is_used(steps: dict[str, Any]) -> None:
    device, note = steps["old"]
    assert device == "cpu"
    assert note == (
        f"torch {note.split()[1]} cannot use Apple M4: mps needs macOS 14, and this is macOS 13.1; "
        "so this study runs on the CPU"
    )
