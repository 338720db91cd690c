"""Test detection on fake machines: trees for /sys and /proc, and a fake nvidia-smi."""

import subprocess
from pathlib import Path

import pytest

from runtime import detected_hardware as hardware
from runtime.detected_hardware import Hardware, detect_hardware, detected_target_name, is_integrated, run_tool
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


def test_an_integrated_gpu_alone_is_a_cpu_machine(machine: Machine) -> None:
    machine.amd(0, 0x15BF, 110003, 4, 24, cpu_cores=16)
    machine.amd(1, 0x1586, 110501, 96, 80)  # large memory carved out of the CPU's does not make it a card
    found = machine.detect()
    assert (found.kind, found.count, len(found.ignored)) == ("cpu", 0, 2)


def test_ten_nodes_are_in_the_order_of_their_numbers(machine: Machine) -> None:
    for node in range(1, 11):
        machine.amd(node, 0x7448 if node == 2 else 0x74A1, 110000, 100, 192)
    assert machine.detect(HIP_VISIBLE_DEVICES="1").name == "AMD Radeon PRO W7900"


def test_an_amd_card_without_a_row_is_generic_under_its_kernel_name(machine: Machine) -> None:
    machine.amd(1, 0x744C, 110000, 23.98, 192)
    assert (machine.detect().name, row(machine.detect())) == ("AMD GPU gfx1100", "generic-rocm")
    machine.put(machine.sys / "class/drm/renderD128/device/product_name", "Radeon RX 7900 XTX")
    assert machine.detect().name == "Radeon RX 7900 XTX"


def test_a_node_that_the_container_cannot_read_is_skipped(machine: Machine) -> None:
    machine.workstation()
    (machine.sys / "class/kfd/kfd/topology/nodes/1/properties").write_text("")
    assert machine.detect().kind == "cpu"


def test_a_card_with_shared_memory_has_no_stated_memory(machine: Machine) -> None:
    machine.nvidia("GPU-eeee, NVIDIA GB10, [N/A], [N/A], 580.95.05")
    assert (machine.detect().memory_bytes, row(machine.detect())) == (0, "generic-cuda")


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
        ("1,0", ["H200", "H200"]),
        ("GPU-h1", ["H200"]),
        ("GPU-h", ["H200"]),
        ("1,-1,0", ["H200"]),
        ("7", []),
        ("-1", []),
        ("", []),
        ("none", []),
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
        ({"HIP_VISIBLE_DEVICES": ""}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}, "rocm"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000abc1"}, "rocm"),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "cpu"),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, "rocm"),
    ],
)
def test_visible_devices_are_interpreted_as_rocm_does(
    machine: Machine, environment: dict[str, str], kind: str
) -> None:
    machine.workstation()
    assert machine.detect(**environment).kind == kind


def test_with_an_nvidia_card_an_amd_card_is_ignored_with_the_reason(machine: Machine) -> None:
    machine.workstation()
    machine.nvidia(A100)
    found = machine.detect()
    assert (found.kind, found.count) == ("cuda", 1)
    assert "AMD Radeon PRO W7900 (another vendor)" in found.ignored


PROC_INFORMATION = "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 100\nGPU UUID: \t GPU-aaaa\n"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (subprocess.TimeoutExpired("nvidia-smi", 8), "nvidia-smi (no answer within 8 s)"),
        (
            subprocess.CalledProcessError(9, "nvidia-smi", "NVIDIA-SMI has failed\nmore"),
            "nvidia-smi (NVIDIA-SMI has failed)",
        ),
        (subprocess.CalledProcessError(15, "nvidia-smi", ""), "nvidia-smi (exit status 15)"),
        (PermissionError(13, "Permission denied"), "nvidia-smi (Permission denied)"),
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


def tool(folder: Path, script: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_hanging_tool_is_ended(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(hardware, "TIMEOUT_SECONDS", 0.2)
    tool(tmp_path, "exec sleep 600")
    found = detect_hardware(machine.sys, machine.proc, run_tool, {})
    assert (found.kind, found.ignored) == ("cpu", ("nvidia-smi (no answer within 0.2 s)",))


def test_the_error_output_of_a_tool_is_reported(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tool(tmp_path, f"echo '{A100}'")
    assert detect_hardware(machine.sys, machine.proc, run_tool, {}).name == "NVIDIA A100-SXM4-40GB"
    tool(tmp_path, "echo 'driver/library version mismatch' >&2; exit 18")
    found = detect_hardware(machine.sys, machine.proc, run_tool, {})
    assert found.ignored == ("nvidia-smi (driver/library version mismatch)",)


@pytest.mark.parametrize(
    ("target", "gib", "flagged", "expected"),
    [
        ("gfx1100", 45, False, False),
        ("gfx1100", 45, True, True),
        ("gfx1036", 16, False, True),
        ("gfx942:sramecc+:xnack-", 128, True, False),  # a datacentre APU is a card for our purpose
        ("gfx9999", 0.5, False, True),
        ("gfx9999", 0, False, False),
    ],
)
def test_integrated_graphics_are_distinguished_from_cards(
    target: str, gib: float, flagged: bool, expected: bool
) -> None:
    assert is_integrated(target, int(gib * GIB), flagged) is expected


def test_the_environment_overrides_detection_with_a_row_of_the_table() -> None:
    for name in TARGETS:
        assert detected_target_name({"RA_DETECTED": name}) == name
    with pytest.raises(TargetError, match=r"RA_DETECTED=h900 is not a target; fix: use one of a100-40g, "):
        detected_target_name({"RA_DETECTED": "h900"})


def test_this_machine_has_a_row() -> None:
    assert detected_target_name({}) in TARGETS
