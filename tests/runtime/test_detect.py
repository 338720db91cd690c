"""Test detection on fake machines: trees for /sys and /proc, and a fake nvidia-smi."""

import subprocess
from pathlib import Path

import pytest

from runtime.detected_hardware import Hardware, detected_target_name
from runtime.gpu_specs import GIB, TARGETS, TargetError, match_target
from tests.runtime.machine import Machine

A100 = "GPU-aaaa, NVIDIA A100-SXM4-40GB, 40960, Disabled, 550.54.15"
RTX4090 = "GPU-bbbb, NVIDIA GeForce RTX 4090, 24564, [N/A], 550.54.15"
GT1030 = "GPU-cccc, NVIDIA GeForce GT 1030, 2048, [N/A], 550.54.15"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def row(found: Hardware) -> str:
    return match_target(found.name, found.memory_bytes, found.kind).name


def test_a_machine_without_a_gpu_is_a_cpu(machine: Machine) -> None:
    assert machine.detect() == Hardware("cpu", "AMD Ryzen 9 7950X", 64 * GIB, 0)


def test_an_a100_is_found_with_its_total_memory_and_driver(machine: Machine) -> None:
    machine.nvidia(A100)
    found = machine.detect()
    assert found == Hardware("cuda", "NVIDIA A100-SXM4-40GB", 40 * GIB, 1, (), "550.54.15")
    assert row(found) == "a100-40g"


def test_integrated_graphics_of_a_ryzen_with_a_w7900_do_not_count(machine: Machine) -> None:
    machine.workstation()
    found = machine.detect()
    assert (found.kind, found.name, found.count, row(found)) == ("rocm", "AMD Radeon PRO W7900", 1, "w7900")
    assert found.memory_bytes == int(47.98 * GIB)
    assert found.ignored == ("AMD GPU gfx1036 (integrated)",)
    assert found.driver == "amdgpu Linux 6.8.0"


def test_a_slice_of_a_card_is_generic_with_the_slices_memory(machine: Machine) -> None:
    listing = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-1)\n"
        "  MIG 1g.5gb+me   Device  1: (UUID: MIG-2)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-ffff)\n"
        "  MIG 2g.10gb     Device  0: (UUID: MIG-3)\n"
    )
    enabled = A100.replace("Disabled", "Enabled")
    machine.nvidia(enabled, enabled.replace("aaaa", "ffff"), listing=listing)
    found = machine.detect()
    assert (found.name, found.memory_bytes) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20 * GIB)
    assert row(found) == "generic-cuda"
    assert machine.detect(CUDA_VISIBLE_DEVICES="MIG-3").memory_bytes == 10 * GIB
    assert machine.detect(CUDA_VISIBLE_DEVICES="MIG-2").memory_bytes == 5 * GIB


def test_the_card_that_cuda_numbers_first_is_used(machine: Machine) -> None:
    machine.nvidia(GT1030, RTX4090)
    assert (machine.detect().name, machine.detect().count) == ("NVIDIA GeForce RTX 4090", 2)
    assert machine.detect(CUDA_VISIBLE_DEVICES="1").name == "NVIDIA GeForce GT 1030"
    assert machine.detect(CUDA_DEVICE_ORDER="PCI_BUS_ID").name == "NVIDIA GeForce GT 1030"
    assert machine.detect(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="1").name.endswith("4090")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["H200"]),
        ("GPU-h1", ["H200"]),
        ("1,-1,0", ["H200"]),
        ("7", []),
        ("", []),
    ],
)
def test_visible_devices_are_interpreted_as_cuda_does(
    machine: Machine, visible: str, names: list[str]
) -> None:
    machine.nvidia(*(f"GPU-h{i}, NVIDIA H200, 143771, Disabled, 570.1" for i in range(2)))
    found = machine.detect(CUDA_VISIBLE_DEVICES=visible)
    assert found.count == len(names)
    assert found.kind == ("cuda" if names else "cpu")
    assert len(found.ignored) == 2 - len(names)
    assert all(entry == "NVIDIA H200 (hidden by CUDA_VISIBLE_DEVICES)" for entry in found.ignored)


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({"HIP_VISIBLE_DEVICES": "0"}, "rocm"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "cpu"),  # the integrated one
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}, "rocm"),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, "rocm"),
    ],
)
def test_visible_devices_are_interpreted_as_rocm_does(
    machine: Machine, environment: dict[str, str], kind: str
) -> None:
    machine.workstation()
    assert machine.detect(**environment).kind == kind


PROC_INFORMATION = "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 100\nGPU UUID: \t GPU-aaaa\n"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (subprocess.TimeoutExpired("nvidia-smi", 8), "nvidia-smi (no answer within 8 s)"),
        (
            subprocess.CalledProcessError(9, "nvidia-smi", "NVIDIA-SMI has failed\nmore"),
            "nvidia-smi (NVIDIA-SMI has failed)",
        ),
    ],
)
def test_where_nvidia_smi_fails_the_name_is_that_of_the_kernel(
    machine: Machine, failure: Exception, reason: str
) -> None:
    machine.answers = {"--query": failure}
    assert machine.detect().kind == "cpu"
    assert machine.detect().ignored == (reason,)
    machine.put(machine.proc / "driver/nvidia/gpus/0000:07:00.0/information", PROC_INFORMATION)
    found = machine.detect()
    assert (found.kind, found.name, found.count, row(found)) == (
        "cuda",
        "NVIDIA A100-SXM4-40GB",
        1,
        "a100-40g",
    )
    assert found.ignored == (reason,)
    assert machine.detect(CUDA_VISIBLE_DEVICES="").kind == "cpu"


def test_the_environment_overrides_detection_with_a_row_of_the_table() -> None:
    for name in TARGETS:
        assert detected_target_name({"RA_DETECTED": name}) == name
    with pytest.raises(TargetError, match=r"RA_DETECTED=h900 is not a target; fix: use one of a100-40g, "):
        detected_target_name({"RA_DETECTED": "h900"})
