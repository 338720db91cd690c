"""The GPUs as torch reports them. torch is imported when asked, not before."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from gpt2.hardware.detect import is_integrated

BFLOAT16_CAPABILITY = (8, 0)  # NVIDIA's compute capability from which bfloat16 is in the hardware (Ampere)


@dataclass(frozen=True)
class TorchDevice:
    """One GPU. memory_bytes: its total, never what is free. capability: NVIDIA's compute capability."""

    index: int
    name: str
    memory_bytes: int
    integrated: bool = False
    capability: tuple[int, int] = BFLOAT16_CAPABILITY


@dataclass(frozen=True)
class TorchDevices:
    """What torch sees. kind: what it was built for; trouble: what it says about a GPU that it cannot use."""

    kind: str  # "cuda", "rocm" or "cpu"
    torch: str
    devices: tuple[TorchDevice, ...] = ()
    runtime: str = ""
    trouble: str = ""


def list_torch_devices(torch: Any = None) -> TorchDevices:
    """The GPUs that torch can use, integrated ones marked; `torch` stands in for the module in tests."""
    if torch is None:
        import torch
    hip, cuda = getattr(torch.version, "hip", None), getattr(torch.version, "cuda", None)
    kind = "rocm" if hip else "cuda" if cuda else "cpu"
    with warnings.catch_warnings(record=True) as caught:  # a driver that is too old is told in a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [_device(index, kind, torch.cuda.get_device_properties(index)) for index in range(count)]
    trouble = next(
        (" ".join(str(warning.message).partition("(Triggered")[0].split()) for warning in caught), ""
    )
    runtime = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else ""
    return TorchDevices(kind, str(torch.__version__), tuple(devices), runtime, trouble)


def _device(index: int, kind: str, seen: Any) -> TorchDevice:
    arch, flagged = str(getattr(seen, "gcnArchName", "")), bool(getattr(seen, "is_integrated", False))
    memory_bytes = int(seen.total_memory)
    integrated = kind == "rocm" and is_integrated(arch, memory_bytes, flagged)
    return TorchDevice(index, str(seen.name), memory_bytes, integrated, (int(seen.major), int(seen.minor)))
