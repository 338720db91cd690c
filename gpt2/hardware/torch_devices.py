"""List the GPUs and NPUs that torch reports, Apple's included. Importing this module does not import torch.

python -m gpt2.hardware.torch_devices      print them as JSON; started by `list_in_child`
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from gpt2.artifacts.typed_json import parse, to_plain
from gpt2.hardware.ascend import is_torch_npu_installed, load_torch_npu
from gpt2.hardware.detect import is_integrated
from gpt2.hardware.gpu_specs import TargetError
from gpt2.hardware.mps import NAMELESS, has_bfloat16, macos, why_unavailable

BFLOAT16_CAPABILITY = (8, 0)  # the first NVIDIA compute capability with bfloat16 in hardware (Ampere)


@dataclass(frozen=True)
class TorchDevice:
    """A GPU or NPU. memory_bytes: total memory, not free memory. capability: NVIDIA's compute capability."""

    index: int
    name: str
    memory_bytes: int
    integrated: bool = False
    capability: tuple[int, int] = BFLOAT16_CAPABILITY


@dataclass(frozen=True)
class TorchDevices:
    """The GPUs of a torch build. kind: the build's hardware; trouble: torch's warning about an unusable GPU.

    "npu" is a CPU build with torch_npu, "mps" a build for Apple's GPU where torch can use it.
    """

    kind: str  # "cuda", "rocm", "npu", "mps" or "cpu"
    torch: str
    gpus: tuple[TorchDevice, ...] = ()
    runtime: str = ""
    trouble: str = ""


def list_torch_devices(torch: Any = None) -> TorchDevices:
    """List the GPUs that torch can use, integrated ones included. torch: a substitute for the module in tests."""
    if torch is None:
        import torch
    hip, cuda = getattr(torch.version, "hip", None), getattr(torch.version, "cuda", None)
    kind = "rocm" if hip else "cuda" if cuda else "cpu"
    runtime = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else ""
    module, trouble = torch.cuda, ""
    if kind == "cpu" and torch.backends.mps.is_available():
        return TorchDevices("mps", str(torch.__version__), (_apple(torch),), macos())
    if kind == "cpu" and (why := why_unavailable(torch)):
        return TorchDevices("cpu", str(torch.__version__), trouble=why)
    if kind == "cpu":
        npu, trouble = load_torch_npu()
        if npu:
            kind, module = "npu", torch.npu
            runtime = f"torch_npu {npu}, CANN {module.utils.get_cann_version() or 'unknown'}"
    with warnings.catch_warnings(record=True) as caught:  # torch warns about a driver that is too old
        warnings.simplefilter("always")
        count = module.device_count() if module.is_available() else 0
        devices = [_device(index, kind, module.get_device_properties(index)) for index in range(count)]
    trouble = next(
        (" ".join(str(warning.message).partition("(Triggered")[0].split()) for warning in caught), trouble
    )
    return TorchDevices(kind, str(torch.__version__), tuple(devices), runtime, trouble)


def _device(index: int, kind: str, properties: Any) -> TorchDevice:
    arch = str(getattr(properties, "gcnArchName", ""))
    flagged = bool(getattr(properties, "is_integrated", False))
    memory_bytes = int(properties.total_memory)
    integrated = kind == "rocm" and is_integrated(arch, memory_bytes, flagged)
    capability = BFLOAT16_CAPABILITY if kind == "npu" else (int(properties.major), int(properties.minor))
    return TorchDevice(index, str(properties.name), memory_bytes, integrated, capability)


def _apple(torch: Any) -> TorchDevice:
    """Return Apple's GPU. Its memory is Metal's recommended maximum. torch.mps has no properties of a device."""
    try:
        name = str(torch.backends.mps.get_name())
    except AttributeError:  # an older torch
        name = NAMELESS
    memory_bytes = int(torch.mps.recommended_max_memory())
    return TorchDevice(
        0, name, memory_bytes, capability=BFLOAT16_CAPABILITY if has_bfloat16(torch) else (0, 0)
    )


def list_in_child() -> TorchDevices:
    """List the GPUs in a short process, so that this one opens no context on a GPU.

    A context needs half a GiB, and a GPU in the mode EXCLUSIVE_PROCESS allows only one. A CPU build needs no process,
    nor does mps, whose memory is the machine's.
    """
    import torch

    if not (torch.version.hip or torch.version.cuda or is_torch_npu_installed()):
        return list_torch_devices(torch)
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise TargetError(
            f"torch {torch.__version__} cannot list the GPUs: {reason}; fix: check the driver (nvidia-smi, rocm-smi, "
            "npu-smi info)"
        )
    return parse(TorchDevices, json.loads(done.stdout.splitlines()[-1]), "devices")


if __name__ == "__main__":
    print(json.dumps(to_plain(list_torch_devices())))
