"""List the accelerators that torch reports and the target table knows. Importing this module does not import torch.

python -m runtime.torch_devices      print them as JSON; started by `list_in_child`
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from runtime.detected_hardware import is_integrated
from runtime.gpu_specs import DEVICE_TYPES, TargetError
from runtime.records import parse, to_plain

BFLOAT16_CAPABILITY = (8, 0)  # the first NVIDIA compute capability with bfloat16 in hardware (Ampere)


@dataclass(frozen=True)
class TorchDevice:
    """An accelerator. memory_bytes: total memory, not free memory. capability: NVIDIA's compute capability."""

    index: int
    name: str
    memory_bytes: int
    integrated: bool = False
    capability: tuple[int, int] = BFLOAT16_CAPABILITY


@dataclass(frozen=True)
class TorchDevices:
    """The accelerators of a torch build. kind: its hardware; trouble: torch's warning about an unusable one."""

    kind: str  # "cuda", "rocm", "npu" or "cpu"
    torch: str
    gpus: tuple[TorchDevice, ...] = ()
    runtime: str = ""
    trouble: str = ""


def list_torch_devices(torch: Any = None) -> TorchDevices:
    """List the accelerators that torch can use, integrated ones included. torch: a substitute for the module in tests.

    One that the target table lacks, as Apple's, is not used. torch loads an installed backend such as torch_npu.
    """
    if torch is None:
        import torch
    hip, cuda = getattr(torch.version, "hip", None), getattr(torch.version, "cuda", None)
    kind = "rocm" if hip else "cuda" if cuda else "cpu"
    runtime = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else ""
    accelerator = torch.accelerator.current_accelerator()
    if kind == "cpu" and accelerator and accelerator.type in DEVICE_TYPES:
        kind = accelerator.type
    if kind == "cpu":
        return TorchDevices(kind, str(torch.__version__))
    module = torch.get_device_module(DEVICE_TYPES[kind])
    with warnings.catch_warnings(record=True) as caught:  # torch warns about a driver that is too old
        warnings.simplefilter("always")
        count = module.device_count() if module.is_available() else 0
        devices = [_device(index, kind, module.get_device_properties(index)) for index in range(count)]
    trouble = next(
        (" ".join(str(warning.message).partition("(Triggered")[0].split()) for warning in caught), ""
    )
    return TorchDevices(kind, str(torch.__version__), tuple(devices), runtime, trouble)


def _device(index: int, kind: str, properties: Any) -> TorchDevice:
    arch = str(getattr(properties, "gcnArchName", ""))
    flagged = bool(getattr(properties, "is_integrated", False))
    memory_bytes = int(properties.total_memory)
    integrated = kind == "rocm" and is_integrated(arch, memory_bytes, flagged)
    major, minor = BFLOAT16_CAPABILITY
    capability = (int(getattr(properties, "major", major)), int(getattr(properties, "minor", minor)))
    return TorchDevice(index, str(properties.name), memory_bytes, integrated, capability)


def list_in_child() -> TorchDevices:
    """List the GPUs in a short process, so that this one opens no context on a GPU.

    A context needs half a GiB, and a GPU in the mode EXCLUSIVE_PROCESS allows only one. A CPU build needs no process.
    """
    import torch

    if not (torch.version.hip or torch.version.cuda or torch.accelerator.current_accelerator()):
        return list_torch_devices(torch)
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise TargetError(
            f"torch {torch.__version__} cannot list the GPUs: {reason}; fix: check the driver (nvidia-smi, rocm-smi)"
        )
    return parse(TorchDevices, json.loads(done.stdout.splitlines()[-1]), "devices")


if __name__ == "__main__":
    print(json.dumps(to_plain(list_torch_devices())))
