"""Find Ascend NPUs: with npu-smi before torch is loaded, and with torch_npu, which registers torch's device "npu".

Standard library only at import. Without an NPU, or without torch_npu, nothing here is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path

NPU_SMI = ("npu-smi", "/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi")
MANAGER = "davinci_manager"  # the driver's device file in /dev; a container without it has no NPU
NAMELESS = "Ascend NPU"
# Two rows of `npu-smi info` describe a device: "| 0  910B3 | OK | ..." and "| 0 | 0000:C1:00.0 | 0 0/0 3382/65536 |"
NAME_ROW = re.compile(r"^\|\s*\d+\s+(?=\S*[A-Za-z_])(\S+)\s*\|\s*[A-Za-z]+\s*\|.*\|$")
MEMORY_ROW = re.compile(r"^\|\s*\d+(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]+:[0-9A-Fa-f:.]+\s*\|.*/\s*(\d+)\s*\|$")


def list_npus(dev: Path, run: Callable[[Sequence[str]], str]) -> tuple[list[tuple[str, int]], str]:
    """Return (name, bytes of memory; 0: unknown) of each NPU in the driver's order, and the driver's version.

    Where npu-smi is missing, the device files in /dev are counted. run: returns the output of a command.
    """
    if not (dev / MANAGER).exists():
        return [], ""
    for tool in NPU_SMI:
        try:
            return parse_npu_smi(run([tool, "info"]))
        except FileNotFoundError:
            continue
    files = [path for path in dev.glob("davinci*") if path.name.removeprefix("davinci").isdecimal()]
    return [(NAMELESS, 0) for _ in files], ""


def parse_npu_smi(output: str) -> tuple[list[tuple[str, int]], str]:
    """Parse the table of `npu-smi info`. The last column is "used / total" of the HBM in MiB."""
    version = re.search(r"Version:\s*(\S+)", output)
    found: list[tuple[str, int]] = []
    name = NAMELESS
    for line in map(str.strip, output.splitlines()):
        if match := NAME_ROW.match(line):
            name = match[1]
        elif match := MEMORY_ROW.match(line):
            found.append((name, int(match[1]) * 2**20))
    return found, version[1] if version else ""


def is_torch_npu_installed() -> bool:
    """Return whether the package torch_npu is installed. It is not loaded."""
    return importlib.util.find_spec("torch_npu") is not None


def load_torch_npu() -> tuple[str | None, str]:
    """Load torch_npu where it is installed beside a CPU build of torch; this registers torch's device "npu".

    Returns its version, None where it is absent or cannot be loaded, and why it cannot: for example without CANN.
    """
    if not is_torch_npu_installed():
        return None, ""
    import torch

    if torch.version.cuda or torch.version.hip:  # torch_npu refuses to load beside another accelerator
        return None, ""
    try:
        version = getattr(importlib.import_module("torch_npu"), "__version__", "of unknown version")
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"torch_npu cannot be loaded: {' '.join(str(error).split())}"
    return str(version), ""
