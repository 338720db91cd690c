"""Test the target table: it is complete, and a device's name and memory select one row."""

import pytest

from runtime.gpu_specs import GIB, TARGETS, match_target

REAL_NAMES = {  # as nvidia-smi and torch print them: GiB, kind, row
    "NVIDIA A100-SXM4-40GB": (39.5, "cuda", "a100-40g"),
    "A100-SXM4-40GB": (39.6, "cuda", "a100-40g"),
    "NVIDIA A100 80GB PCIe": (79.1, "cuda", "a100-80g"),
    "NVIDIA H100 80GB HBM3": (79.1, "cuda", "h100"),
    "NVIDIA H100 NVL": (93.1, "cuda", "h100"),
    "NVIDIA H200": (139.8, "cuda", "h200"),
    "NVIDIA GeForce RTX 4090": (23.6, "cuda", "rtx4090"),
    "AMD Radeon Pro W7900 Dual Slot": (47.98, "rocm", "w7900"),
    "AMD Instinct MI300X OAM": (191.98, "rocm", "mi300x"),
    "Ascend910B4-1": (61.27, "npu", "910b"),
    "Ascend910_9392": (61.27, "npu", "910c"),
}
OTHERS = {  # neighbours that are not the card: generic
    "NVIDIA GeForce RTX 4090 Laptop GPU": (15.7, "cuda"),
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": (19.6, "cuda"),
    "NVIDIA A100-SXM-64GB": (63.4, "cuda"),
    "NVIDIA H20": (95.0, "cuda"),
    "AMD Radeon PRO W7900D": (44.98, "rocm"),
    "AMD Instinct MI300A": (127.5, "rocm"),
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
