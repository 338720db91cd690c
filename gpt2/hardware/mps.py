"""Apple's GPU, torch's device "mps": its detection, its memory, and operations that torch computes on the CPU instead.

Standard library only at import. torch supports it on Apple silicon with macOS 14 or newer (release notes of torch 2.9).
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from gpt2.system.resource_errors import NO_MPS_KERNEL

GIB = 2**30
NAMELESS = "Apple GPU"
SYSCTL = ("sysctl", "/usr/sbin/sysctl")
FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
BFLOAT16_MACOS = (14, 0)  # the first macOS whose Metal has bfloat16 (pytorch/pytorch pull request 119641)
PLANNED_MEMORY = 16 * GIB  # of the Mac for which a machine without Apple's GPU plans
NOTES = (
    "memory is Metal's recommended maximum for the GPU, which shares it with the CPU",
    "attention stores T x T scores: torch has no fused kernel with gradients for mps",
    "the peak of memory is the largest sample at the ends of phases, since torch.mps has no peak",
)
COMPILED = "torch.compile is a prototype on mps and was not tested here (pytorch issue 150121)"


def list_apple_gpu(run: Callable[[Sequence[str]], str]) -> list[tuple[str, int]]:
    """Return (name, bytes that the GPU may use) of Apple's GPU; nothing on other machines.

    run: returns the output of a command. A Python under Rosetta is one for x86_64, for which torch has no mps.
    """
    if not is_apple_silicon():
        return []
    for tool in SYSCTL:
        try:
            lines = run([tool, "-n", "machdep.cpu.brand_string", "hw.memsize"]).splitlines()
        except FileNotFoundError:
            continue
        name, memory = (*map(str.strip, lines), "", "")[:2]
        return [(name or NAMELESS, usable_bytes(int(memory)) if memory.isdecimal() else 0)]
    return [(NAMELESS, 0)]


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def macos() -> str:
    return f"macOS {platform.mac_ver()[0] or 'of unknown version'}"


def usable_bytes(memory_bytes: int) -> int:
    """Return the part of a Mac's memory that its GPU may use, until torch reports it.

    Metal's recommendedMaxWorkingSetSize is two thirds on Macs of 16 and 32 GiB, and three quarters on those of 64 and
    96 GiB, in the logs of llama.cpp (abetlen/llama-cpp-python issue 687, ollama/ollama issue 434, ggml-org/llama.cpp
    issues 1870 and 3213).
    """
    return memory_bytes * 3 // 4 if memory_bytes >= 64 * GIB else memory_bytes * 2 // 3


def why_unavailable(torch: Any) -> str:
    """Return why a torch has no device "mps" on Apple silicon; empty where it has it, or on another machine."""
    if not is_apple_silicon() or torch.backends.mps.is_available():
        return ""
    if not torch.backends.mps.is_built():
        return "it was built without mps"
    return f"mps needs macOS 14, and this is {macos()}"


def has_bfloat16(torch: Any) -> bool:
    """Return whether Metal has bfloat16 on this version of macOS."""
    return bool(torch.backends.mps.is_macos_or_newer(*BFLOAT16_MACOS))


def fallback_enabled() -> bool:
    """Return whether torch computes operations without a kernel for mps on the CPU. torch reads it when loaded."""
    return os.environ.get(FALLBACK, "").strip().lstrip("0") != ""


@functools.cache
def fallback_log() -> FallbackLog:
    """Return the log of this process; the first call starts it."""
    return FallbackLog()


class FallbackLog:
    """The operations of this process that torch computed on the CPU, by its warnings, from the log's start on.

    torch warns for the first of them alone, so the log lets it warn always. Other warnings are shown as before. A few
    operations are computed there without FALLBACK too (torch's MPSFallback.mm).
    """

    def __init__(self) -> None:
        import torch

        self.operations: set[str] = set()
        self._show = warnings.showwarning
        torch.set_warn_always(True)
        # an operation is named in the text, so each is shown once
        warnings.filterwarnings("default", message=r"The operator '.*MPS")
        warnings.showwarning = self._shown

    def _shown(self, message: Warning | str, *arguments: Any, **options: Any) -> None:
        if match := NO_MPS_KERNEL.search(str(message)):
            self.operations.add(match[1])
        else:
            self._show(message, *arguments, **options)

    def note(self) -> str:
        """Return the note of a finished run; empty where FALLBACK is not set and no operation was computed there."""
        if not self.operations and not fallback_enabled():
            return ""
        named = ", ".join(sorted(self.operations)) or "none"
        setting = f" ({FALLBACK}=1)" if fallback_enabled() else ""
        return f"operations without a kernel for mps that torch computed on the CPU{setting}: {named}"
