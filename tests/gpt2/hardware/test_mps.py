"""Detect and resolve Apple's GPU, on machines that stand-ins of the system's functions describe."""

import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpt2.config.config import ModelConfig, OptimizerConfig, TargetConfig
from gpt2.hardware import mps
from gpt2.hardware.detect import Hardware, detect_hardware, detected_target_name
from gpt2.hardware.gpu_specs import GIB, TargetError
from gpt2.hardware.resolve import resolve, scale_notice
from gpt2.hardware.torch_devices import TorchDevice, TorchDevices, list_torch_devices
from gpt2.memory.prediction import WORKSPACE, predict
from gpt2.memory.workload import StepWorkload
from gpt2.system import ranks
from gpt2.system.errors import UserError
from gpt2.system.resource_errors import explain_missing_operation
from study.executors.slots import SlotsError, card_slots, local_slots
from study.memory.micro_batch import free_bytes

M4 = Hardware("mps", "Apple M4", usable := 32 * GIB // 3, 1)
DEVICES = TorchDevices("mps", "2.13.0", (TorchDevice(0, "Apple M4", usable),), "macOS 15.1")
WITHOUT = TorchDevices("cpu", "2.13.0", trouble="it was built without mps")
NO_KERNEL = (
    "The operator 'aten::_linalg_solve_ex.result' is not currently implemented for the MPS device. If you want this op "
    "to be considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287"
)


def config(name: str = "auto", dtype: str = "auto", detected: str = "mps", n: int = 1) -> TargetConfig:
    scale_cpu = name in ("mps", "cpu") or (name == "auto" and detected in ("mps", "cpu"))
    return TargetConfig(name, dtype, False, 0, detected, scale_cpu, ranks=n)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.delenv("RA_DETECTED", raising=False)
    return monkeypatch


def sysctl(command: Sequence[str]) -> str:
    assert list(command[1:]) == ["-n", "machdep.cpu.brand_string", "hw.memsize"]
    if command[0] == "sysctl":  # not in PATH
        raise FileNotFoundError(2, "No such file or directory", "sysctl")
    return "Apple M4\n17179869184\n"


def tools(command: Sequence[str]) -> str:
    if "sysctl" not in command[0]:
        raise FileNotFoundError(2, "No such file or directory", command[0])
    return sysctl(command)


def test_a_mac_is_found_by_sysctl_before_torch_is_loaded(
    mac: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    found = detect_hardware(sys=tmp_path, proc=tmp_path, dev=tmp_path, run=tools, environment={})  # type: ignore[arg-type]
    assert found == Hardware("mps", "Apple M4", 17179869184 * 2 // 3, 1)
    mac.setattr("gpt2.hardware.detect.detect_hardware", lambda environment: found)
    assert detected_target_name({}) == "mps"


def test_an_intel_mac_or_another_system_has_no_mps(mac: pytest.MonkeyPatch) -> None:
    assert mps.list_apple_gpu(sysctl)
    mac.setattr(platform, "machine", lambda: "x86_64")  # and Python under Rosetta
    assert mps.list_apple_gpu(sysctl) == []
    mac.setattr(platform, "machine", lambda: "arm64")
    mac.setattr(sys, "platform", "linux")
    assert mps.list_apple_gpu(sysctl) == []


def test_a_mac_without_sysctl_has_a_gpu_of_unknown_memory(mac: pytest.MonkeyPatch) -> None:
    def missing(command: Sequence[str]) -> str:
        raise FileNotFoundError(2, "No such file or directory", command[0])

    assert mps.list_apple_gpu(missing) == [("Apple GPU", 0)]


@pytest.mark.parametrize(("gib", "usable_mib"), [(16, 10922.67), (32, 21845.34), (64, 49152), (96, 73728)])
def test_the_usable_memory_is_that_of_published_logs(gib: int, usable_mib: float) -> None:
    assert mps.usable_bytes(gib * GIB) / 2**20 == pytest.approx(usable_mib, abs=0.01)


def test_auto_selects_apples_gpu_in_float32() -> None:
    got = resolve(config(), devices=DEVICES, hardware=M4)
    assert (got.target.name, got.device, got.device_type, got.device_name) == (
        "mps", "mps:0", "mps", "Apple M4",
    )  # fmt: skip
    assert (got.memory_bytes, got.dtype, got.attention_backend, got.driver) == (
        usable, "float32", "math", "macOS 15.1",
    )  # fmt: skip
    assert got.note == "; ".join(mps.NOTES)
    compiled = replace(config(), compile=True)
    assert resolve(compiled, devices=DEVICES, hardware=M4).note == "; ".join((*mps.NOTES, mps.COMPILED))
    for planned in (compiled, config()):
        note = resolve(replace(planned, name="mps"), hardware=M4, planning=True).note
        assert (mps.COMPILED in (note or "")) == planned.compile
    assert resolve(config("mps"), devices=DEVICES, hardware=M4).device == "mps:0"
    assert resolve(config("mps", "bfloat16"), devices=DEVICES, hardware=M4).dtype == "bfloat16"
    assert resolve(config("cpu"), devices=DEVICES, hardware=M4).device == "cpu"


def test_bfloat16_before_macos_14_is_refused_in_one_line(mac: pytest.MonkeyPatch) -> None:
    mac.setattr(platform, "mac_ver", lambda: ("13.6", ("", "", ""), "arm64"))
    old = TorchDevices("mps", "2.8.0", (TorchDevice(0, "Apple M1", usable, capability=(0, 0)),))
    with pytest.raises(TargetError, match=r"^CONFIG_DTYPE_BFLOAT16=y, but .* macOS 13.6; fix: set [^\n]*$"):
        resolve(config("mps", "bfloat16"), devices=old, hardware=M4)
    assert resolve(config("mps"), devices=old, hardware=M4).dtype == "float32"


def test_without_mps_in_torch_the_study_runs_on_the_cpu_and_says_so() -> None:
    for detected in ("mps", "a100-40g"):
        got = resolve(config(detected=detected), devices=WITHOUT, hardware=M4)
        assert (got.target.name, got.device) == ("cpu", "cpu")
        assert got.note == (
            "torch 2.13.0 cannot use Apple M4: it was built without mps; so this study runs on the CPU"
        )
    with pytest.raises(TargetError, match=r"cannot use it: it was built without mps; fix: macOS 14 or newer"):
        resolve(config("mps"), devices=WITHOUT, hardware=M4)


def test_the_reason_is_the_build_or_the_version_of_macos(mac: pytest.MonkeyPatch) -> None:
    def torch(available: bool, built: bool) -> SimpleNamespace:
        backend = SimpleNamespace(is_available=lambda: available, is_built=lambda: built)
        version = SimpleNamespace(hip=None, cuda=None)
        cuda = SimpleNamespace(is_available=lambda: False)
        return SimpleNamespace(
            backends=SimpleNamespace(mps=backend), version=version, __version__="2.13.0", cuda=cuda
        )

    assert mps.why_unavailable(torch(True, True)) == ""
    assert list_torch_devices(torch(False, False)).trouble == "it was built without mps"
    assert list_torch_devices(torch(False, True)).trouble == "mps needs macOS 14, and this is macOS 15.1"
    mac.setattr(sys, "platform", "linux")
    assert mps.why_unavailable(torch(False, False)) == ""


def test_a_mac_is_no_other_card_and_another_machine_is_no_mac() -> None:
    with pytest.raises(TargetError, match=r"CONFIG_TARGET_H100=y .*, but this machine has Apple M4"):
        resolve(config("h100"), devices=DEVICES, hardware=M4)
    cpu = Hardware("cpu", "AMD EPYC", 64 * GIB, 0)
    with pytest.raises(TargetError, match=r"^CONFIG_TARGET_MPS=y, but this machine has no GPU: AMD EPYC"):
        resolve(config("mps"), devices=TorchDevices("cpu", "2.13.0"), hardware=cpu)


def test_one_device_takes_one_process_and_one_run() -> None:
    with pytest.raises(
        TargetError, match=r"^CONFIG_RANKS=2 needs a card .* has 1: Apple M4; fix: set CONFIG_RANKS=1$"
    ):
        resolve(config("mps", n=2), devices=DEVICES, hardware=M4)
    got = resolve(config("mps"), devices=DEVICES, hardware=M4)
    assert [slot.environment for slot in local_slots(0, got, 0)] == [{}]
    with pytest.raises(
        SlotsError, match=r"CONFIG_SLOTS=2 needs 2 cards, and this machine has 1 x Apple M4; fix"
    ):
        card_slots(2, got, DEVICES, {})


def test_ranks_of_several_macs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ranks.VARIABLES:
        monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match=r"^mps has no communication .*; fix: set CONFIG_RANKS=1"):
        ranks.join("mps", 60)


def test_free_memory_is_not_known() -> None:
    assert free_bytes("mps:0") is None


def test_a_plan_is_of_this_mac_or_of_one_with_16_gib() -> None:
    here = resolve(config("mps"), planning=True, hardware=M4)
    assert (here.device_name, here.memory_bytes) == ("Apple M4", usable)
    elsewhere = resolve(config("mps"), planning=True, hardware=Hardware("cpu", "AMD EPYC", 64 * GIB, 0))
    assert (elsewhere.device_name, elsewhere.memory_bytes) == (
        "Apple GPU of a Mac with 16 GiB",
        32 * GIB // 3,
    )
    assert (elsewhere.dtype, elsewhere.attention_backend, elsewhere.device) == ("float32", "math", "mps:0")
    assert "two thirds" in (elsewhere.note or "")


def test_the_scale_is_that_of_a_cpu_study() -> None:
    assert scale_notice(config(), "mps") is None
    gpu = TargetConfig("auto", "auto", True, 0, "h100", scale_cpu=False)
    assert "this machine has no GPU" in (scale_notice(gpu, "mps") or "")


@pytest.mark.parametrize(("value", "enabled"), [("", False), ("0", False), ("1", True), (" 1", True)])
def test_the_fallback_is_read_as_torch_reads_it(
    monkeypatch: pytest.MonkeyPatch, value: str, enabled: bool
) -> None:
    monkeypatch.setenv(mps.FALLBACK, value)
    assert mps.fallback_enabled() is enabled


def test_a_missing_operation_is_named_with_the_fix() -> None:
    assert explain_missing_operation(NotImplementedError(NO_KERNEL)) == (
        "torch has no aten::_linalg_solve_ex.result for mps; fix: PYTORCH_ENABLE_MPS_FALLBACK=1 make, which computes "
        "such operations on the CPU and names them in run.json, or set CONFIG_TARGET_CPU=y"
    )
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = NotImplementedError(NO_KERNEL)
    assert "aten::_linalg_solve_ex.result" in explain_missing_operation(wrapped)
    assert explain_missing_operation(NotImplementedError("abstract")) == ""
    assert explain_missing_operation(RuntimeError(NO_KERNEL)) == ""


def test_the_prediction_of_memory_counts_the_scores_of_attention() -> None:
    B, H, T, layers = 4, 2, 256, 2
    model = ModelConfig("test", layers, H, 32, T, 0.0, 50, 64)
    optimizer = OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, 1.0, "cosine", 0.2)

    def forward(kind: str) -> int:
        work = StepWorkload(model, optimizer, None, B, 1, kind, "float32")
        return predict(work).timeline.by_phase()["forward"] - WORKSPACE[kind]

    scores = layers * B * H * T * T * 4  # of float32, kept for backward
    assert scores <= forward("mps") - forward("rocm") < 4 * scores
