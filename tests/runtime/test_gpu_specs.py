"""Test the target table: it is complete, and a device's name and memory select one row."""

import subprocess
import sys

import pytest

from runtime.gpu_specs import AOTRITON, GIB, TARGETS, match_target

REAL_NAMES = {  # as nvidia-smi and torch print them: GiB, kind, row
    "NVIDIA A100-SXM4-40GB": (39.5, "cuda", "a100-40g"),
    "A100-SXM4-40GB": (39.6, "cuda", "a100-40g"),
    "NVIDIA A100-PCIE-40GB": (39.4, "cuda", "a100-40g"),
    "NVIDIA A100-SXM4-80GB": (79.2, "cuda", "a100-80g"),
    "NVIDIA A100-SXM-80GB": (79.2, "cuda", "a100-80g"),
    "NVIDIA A100 80GB PCIe": (79.1, "cuda", "a100-80g"),
    "NVIDIA H100 80GB HBM3": (79.1, "cuda", "h100"),
    "NVIDIA H100 PCIe": (79.1, "cuda", "h100"),
    "NVIDIA H100 NVL": (93.1, "cuda", "h100"),
    "NVIDIA H200": (139.8, "cuda", "h200"),
    "NVIDIA H200 NVL": (139.7, "cuda", "h200"),
    "NVIDIA GeForce RTX 4090": (23.6, "cuda", "rtx4090"),
    "AMD Radeon PRO W7900": (44.98, "rocm", "w7900"),
    "AMD Radeon Pro W7900 Dual Slot": (47.98, "rocm", "w7900"),
    "Radeon PRO W7900 Dual Slot": (44.98, "rocm", "w7900"),
    "AMD Instinct MI300X": (191.98, "rocm", "mi300x"),
    "AMD Instinct MI300X VF": (191.69, "rocm", "mi300x"),
    "AMD Instinct MI300X OAM": (191.98, "rocm", "mi300x"),
    "Ascend910B2": (60.97, "npu", "910b"),
    "Ascend910B3": (60.97, "npu", "910b"),
    "Ascend910B4-1": (61.27, "npu", "910b"),
    "Ascend910_9392": (61.27, "npu", "910c"),
}
OTHERS = {  # neighbours that are not the card: generic
    "NVIDIA GeForce RTX 4090 Laptop GPU": (15.7, "cuda"),
    "NVIDIA GeForce RTX 4090 D": (23.6, "cuda"),
    "NVIDIA GeForce RTX 3090": (23.6, "cuda"),
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": (19.6, "cuda"),
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": (9.8, "cuda"),
    "NVIDIA A100-SXM-64GB": (63.4, "cuda"),
    "NVIDIA A800-SXM4-80GB": (79.2, "cuda"),
    "NVIDIA H20": (95.0, "cuda"),
    "NVIDIA GH200 480GB": (94.5, "cuda"),
    "NVIDIA B200": (178.4, "cuda"),
    "Tesla T4": (14.6, "cuda"),
    "AMD Radeon PRO W7900D": (44.98, "rocm"),
    "AMD Radeon PRO W7800": (31.9, "rocm"),
    "AMD Radeon RX 7900 XTX": (23.98, "rocm"),
    "AMD Instinct MI300A": (127.5, "rocm"),
    "AMD Instinct MI325X": (255.98, "rocm"),
    "Ascend910B4": (29.5, "npu"),
}


@pytest.mark.parametrize("name", REAL_NAMES)
def test_a_real_device_name_matches_exactly_one_row(name: str) -> None:
    gib, kind, row = REAL_NAMES[name]
    assert [other.name for other in TARGETS.values() if other.matches(name)] == [row]
    assert match_target(name, int(gib * GIB), kind).name == row
    assert match_target(f" {name.upper()} ", int(gib * GIB), kind).name == row


@pytest.mark.parametrize("name", OTHERS)
def test_a_card_with_a_similar_name_is_generic(name: str) -> None:
    gib, kind = OTHERS[name]
    assert not any(row.matches(name) for row in TARGETS.values())
    assert match_target(name, int(gib * GIB), kind).name == f"generic-{kind}"


def test_a_slice_with_the_name_of_the_whole_card_is_generic_by_its_memory() -> None:
    assert match_target("NVIDIA A100-SXM4-40GB", int(19.6 * GIB), "cuda").name == "generic-cuda"
    assert match_target("AMD Instinct MI300X", 24 * GIB, "rocm").name == "generic-rocm"


def test_without_a_known_memory_the_name_decides() -> None:
    assert match_target("NVIDIA A100-SXM4-40GB", 0, "cuda").name == "a100-40g"


def test_a_card_of_another_vendor_never_matches() -> None:
    assert match_target("NVIDIA H200", 140 * GIB, "rocm").name == "generic-rocm"
    assert match_target("NVIDIA H200", 140 * GIB, "cpu").name == "cpu"


def test_a_slower_form_factor_has_a_lower_peak() -> None:
    sxm = match_target("NVIDIA H100 80GB HBM3", 79 * GIB, "cuda")
    pcie = match_target("NVIDIA H100 PCIe", 79 * GIB, "cuda")
    assert (pcie.name, pcie.memory_bytes) == (sxm.name, sxm.memory_bytes)
    assert pcie.peak_flops is not None
    assert sxm.peak_flops is not None
    assert pcie.peak_flops < sxm.peak_flops
    assert "PCIe" in pcie.peak_source


@pytest.mark.parametrize("name", TARGETS)
def test_every_row_is_complete(name: str) -> None:
    row = TARGETS[name]
    card = not (name.startswith("generic") or name == "cpu")
    assert row.name == name
    assert row.title
    assert row.kind in ("cuda", "rocm", "npu", "cpu")
    preferred = {"h100": "cudnn", "h200": "cudnn"} | dict.fromkeys(("910b", "910c", "generic-npu"), "fusion")
    assert row.dtype == ("float32" if row.kind == "cpu" else "bfloat16")
    assert row.attention_backend == preferred.get(name, "flash")
    assert "math" not in row.attention
    assert ("cudnn" in row.attention) == (row.kind == "cuda")
    assert bool(row.patterns) == (row.memory_bytes is not None) == card
    assert (row.peak_flops is not None) == (card and row.kind != "npu")
    if row.kind == "npu":
        assert row.environment == {"INF_NAN_MODE_ENABLE": "1"}
    elif card:
        assert str(row.peak_source).split()[0] in ("NVIDIA", "AMD")
        assert 1e14 < (row.peak_flops or 0) < 2e15
        assert all(0 < peak <= (row.peak_flops or 0) for _, peak, _ in row.forms)


def test_the_table_holds_the_cards_that_the_configuration_offers() -> None:
    from runtime.settings import TARGETS as OFFERED

    assert set(OFFERED.values()) - {"auto"} == {name for name in TARGETS if not name.startswith("generic")}


def test_a_w7900_has_the_aotriton_switch_and_an_instinct_needs_none() -> None:
    assert TARGETS["w7900"].environment == AOTRITON == {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}
    assert TARGETS["generic-rocm"].environment == AOTRITON
    assert TARGETS["mi300x"].environment == {}


def test_table_detection_and_target_import_without_torch() -> None:
    modules = "runtime.gpu_specs, runtime.detected_hardware, runtime.resolved_target"
    script = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
