"""Test the resolution of a target to a device, on machines that a fake torch describes."""

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.detected_hardware import Hardware
from runtime.gpu_specs import GIB, TARGETS, TargetError
from runtime.resolved_target import resolve
from runtime.settings import TARGETS as OFFERED
from runtime.settings import TargetConfig
from runtime.torch_devices import list_torch_devices

CPU = Hardware("cpu", "AMD EPYC", 64 * GIB, 0)
A100 = Hardware("cuda", "NVIDIA A100-SXM4-40GB", 40 * GIB, 1, (), "550.54.15")
W7900 = Hardware(
    "rocm", "AMD Radeon PRO W7900", 48 * GIB, 1, ("AMD GPU gfx1036 (integrated)",), "amdgpu 6.12"
)


def config(
    name: str = "auto", dtype: str = "auto", detected: str = "a100-40g", scale_cpu: bool | None = None
) -> TargetConfig:
    scale_cpu = (name == "cpu" or (name == "auto" and detected == "cpu")) if scale_cpu is None else scale_cpu
    return TargetConfig(
        name=name, dtype=dtype, compile=False, cpu_threads=0, detected=detected, scale_cpu=scale_cpu
    )


def card(
    name: str, gib: float, major: int = 8, arch: str | None = None, integrated: int = 0
) -> SimpleNamespace:
    """Return device properties in the form of torch.cuda.get_device_properties."""
    return SimpleNamespace(
        name=name,
        total_memory=int(gib * GIB),
        major=major,
        minor=0,
        gcnArchName=arch or name,
        is_integrated=integrated,
    )


def fake_torch(
    *cards: Any, cuda: str | None = None, hip: str | None = None, warning: str = "", accelerator: str = ""
) -> Any:
    def is_available() -> bool:
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=1)
        return bool(cards)

    device = SimpleNamespace(type=accelerator) if accelerator else None
    module = SimpleNamespace(
        is_available=is_available,
        device_count=lambda: len(cards),
        get_device_properties=lambda i: cards[i],
    )
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=hip),
        accelerator=SimpleNamespace(current_accelerator=lambda: device),
        get_device_module=lambda device: module,
    )


def nvidia(*cards: Any, warning: str = "") -> Any:
    return list_torch_devices(fake_torch(*cards, cuda="12.8", warning=warning))


def amd(*cards: Any) -> Any:
    return list_torch_devices(fake_torch(*cards, hip="6.4"))


CPU_BUILD = list_torch_devices(fake_torch())
ONE_A100 = nvidia(card("NVIDIA A100-SXM4-40GB", 39.5))
RYZEN = card("AMD Radeon Graphics", 0.5, 10, "gfx1036", 1)
RYZEN_WITH_MUCH_MEMORY = card("AMD Radeon Graphics", 31.0, 10, "gfx1036", 0)
PRO = card("AMD Radeon PRO W7900", 44.98, 11, "gfx1100")
MACHINES = {  # one machine each, as torch and the system report it
    "a100-40g": (ONE_A100, A100),
    "h200": (nvidia(card("NVIDIA H200", 139.8, 9)), Hardware("cuda", "NVIDIA H200", 140 * GIB, 1)),
    "w7900": (amd(PRO), W7900),
    "mi300x": (amd(card("AMD Instinct MI300X", 191.98, 9, "gfx942:sramecc+")), Hardware("rocm", "", 0, 1)),
    "cpu": (CPU_BUILD, CPU),
}


def test_auto_selects_the_present_card() -> None:
    got = resolve(config(), devices=ONE_A100, hardware=A100)
    assert (got.target.name, got.device, got.device_name) == ("a100-40g", "cuda:0", "NVIDIA A100-SXM4-40GB")
    assert (got.memory_bytes, got.dtype, got.attention_backend) == (int(39.5 * GIB), "bfloat16", "flash")
    assert (got.driver, got.torch, got.note) == ("550.54.15 (CUDA 12.8)", "2.13.0", None)


@pytest.mark.parametrize("ryzen", [RYZEN, RYZEN_WITH_MUCH_MEMORY])
@pytest.mark.parametrize("first", [True, False])
def test_integrated_graphics_of_a_ryzen_are_neither_used_nor_counted(ryzen: Any, first: bool) -> None:
    got = resolve(config(), devices=amd(*((ryzen, PRO) if first else (PRO, ryzen))), hardware=W7900)
    assert (got.target.name, got.device) == ("w7900", "cuda:1" if first else "cuda:0")
    assert got.note == "integrated GPU ignored: AMD Radeon Graphics"
    assert got.driver == "amdgpu 6.12 (HIP 6.4)"


def test_a_configured_card_is_found_among_others() -> None:
    devices = nvidia(card("NVIDIA GeForce RTX 4090", 23.6), card("NVIDIA A100-SXM4-40GB", 39.5))
    assert resolve(config("a100-40g"), devices=devices, hardware=A100).device == "cuda:1"


@pytest.mark.parametrize("here", MACHINES)
@pytest.mark.parametrize("asked", [name for name in OFFERED.values() if name != "auto"])
def test_a_configured_target_that_is_absent_is_refused(asked: str, here: str) -> None:
    devices, hardware = MACHINES[here]
    if asked in (here, "cpu"):
        assert resolve(config(asked), devices=devices, hardware=hardware).target.name == asked
        return
    with pytest.raises(TargetError) as refusal:
        resolve(config(asked), devices=devices, hardware=hardware)
    message = str(refusal.value)
    assert message.startswith(f"CONFIG_TARGET_{asked.upper().replace('-', '_')}=y")
    assert "\n" not in message
    assert "CONFIG_TARGET_AUTO=y" in message
    assert (devices.gpus[0].name if devices.gpus else "AMD EPYC") in message


def test_a_gpu_with_a_cpu_build_of_torch_is_an_error_with_the_fix() -> None:
    for asked in ("auto", "a100-40g"):
        with pytest.raises(TargetError) as refusal:
            resolve(config(asked), devices=CPU_BUILD, hardware=A100)
        message = str(refusal.value)
        assert message.startswith(
            "NVIDIA A100-SXM4-40GB is present, but torch 2.13.0 cannot use it: it was built for CPUs"
        )
        assert "CUDA build" in message
        assert "make PYTHON=" in message


def test_a_card_without_bfloat16_uses_float32_and_refuses_bfloat16() -> None:
    old = nvidia(card("Tesla V100-SXM2-16GB", 15.8, 7))
    got = resolve(config(), devices=old, hardware=A100)
    assert (got.target.name, got.dtype, got.attention_backend) == ("generic-cuda", "float32", "efficient")
    with pytest.raises(
        TargetError, match=r"Tesla V100-SXM2-16GB \(compute capability 7\.0\) has no bfloat16"
    ):
        resolve(config(dtype="bfloat16"), devices=old, hardware=A100)


@pytest.mark.parametrize("name", [name for name, row in TARGETS.items() if row.memory_bytes])
def test_planning_for_a_card_does_not_need_the_card(name: str) -> None:
    row = TARGETS[name]
    for asked in (config(name), config("auto", detected=name)):
        got = resolve(asked, planning=True, hardware=CPU)
        assert (got.target, got.memory_bytes, got.dtype) == (row, row.memory_bytes, row.dtype)
        assert (got.torch, got.driver) == (None, None)


def test_planning_for_an_unknown_card_needs_the_card() -> None:
    asked = config(detected="generic-cuda")
    assert resolve(asked, planning=True, hardware=A100).memory_bytes == A100.memory_bytes
    with pytest.raises(TargetError, match=r"memory size of generic-cuda is unknown"):
        resolve(asked, planning=True, hardware=CPU)
    with pytest.raises(TargetError, match=r"CONFIG_DETECTED=h900 is not a target"):
        resolve(config(detected="h900"), planning=True, hardware=CPU)


def as_rank(monkeypatch: pytest.MonkeyPatch, number: int, count: int) -> None:
    values = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


def test_each_rank_has_a_card_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    found = nvidia(
        card("NVIDIA A100-SXM4-40GB", 39.5), card("NVIDIA H100", 79.0), card("NVIDIA A100-SXM4-40GB", 39.5)
    )
    two = dataclasses.replace(config("a100-40g"), ranks=2)
    for number, device in enumerate(("cuda:0", "cuda:2")):
        as_rank(monkeypatch, number, 2)
        resolved = resolve(two, devices=dataclasses.replace(found), hardware=A100)
        assert (resolved.device, resolved.device_name) == (device, "NVIDIA A100-SXM4-40GB")


def test_more_ranks_than_cards_are_refused() -> None:
    two = dataclasses.replace(config(), ranks=2)
    with pytest.raises(
        TargetError, match=r"CONFIG_RANKS=2 needs a card for each .* has 1: .*; fix: set CONFIG_RANKS=1"
    ):
        resolve(two, devices=ONE_A100, hardware=A100)
    assert resolve(dataclasses.replace(two, name="cpu"), devices=CPU_BUILD, hardware=CPU).device == "cpu"
