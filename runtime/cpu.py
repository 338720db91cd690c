"""Read the CPU's name, and the memory and cores available to this process. Standard library only.

A container's limits (cgroup v1 and v2) and the scheduler's affinity apply, not the machine's totals.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

SYS, PROC = Path("/sys"), Path("/proc")
UNLIMITED = 2**60  # bytes; cgroup v1 writes "no limit" as a number just below 2**63


def read_text(path: Path) -> str:
    """Read a file's text without surrounding white space; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_integer(path: Path) -> int:
    """Read a file's whole number; 0 where there is none."""
    text = read_text(path)
    return int(text) if text.isdecimal() else 0


def cpu_name(proc: Path = PROC) -> str:
    """Read the processor's model name."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", read_text(proc / "cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else "CPU"


def memory_bytes(sys: Path = SYS, proc: Path = PROC) -> int:
    """Return the total memory available to this process, in bytes: the machine's, or a container's limit."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read_text(proc / "meminfo"), re.MULTILINE)
    total = int(found.group(1)) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [read_integer(folder / "memory.max") for folder in _groups(sys, proc, "")]
    limits += [read_integer(folder / "memory.limit_in_bytes") for folder in _groups(sys, proc, "memory")]
    return min([total, *(limit for limit in limits if 0 < limit < UNLIMITED)])


def allowed_cpus() -> set[int]:
    """Return the logical CPUs that this process may use; all of them where the system has no affinity (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    found: set[int] = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    return found


def cpu_threads(requested: int, sys: Path = SYS, proc: Path = PROC, allowed: set[int] | None = None) -> int:
    """Return `requested` threads, or for 0 one thread per physical core available to this process.

    Hyper-threads share a core's arithmetic units, so they count once. allowed: logical CPUs (default: the
    scheduler's affinity). A container's CPU quota is an upper bound; the result is at least 1.
    """
    if requested:
        return requested
    allowed = allowed_cpus() if allowed is None else allowed
    topology = [sys / "devices/system/cpu" / f"cpu{cpu}" / "topology" for cpu in sorted(allowed)]
    siblings = [read_text(folder / "thread_siblings_list") or str(folder) for folder in topology]
    quotas = [len(set(siblings)), *_cpu_quotas(sys, proc)]
    return max(1, int(min(quotas)))


def _cpu_quotas(sys: Path, proc: Path) -> Iterator[float]:
    """Yield the CPU limit of each enclosing cgroup, in CPUs. Groups without a limit are skipped."""
    for folder in _groups(sys, proc, ""):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    for folder in [*_groups(sys, proc, "cpu"), *_groups(sys, proc, "cpu,cpuacct")]:
        granted, period_us = (
            read_integer(folder / "cpu.cfs_quota_us"),
            read_integer(folder / "cpu.cfs_period_us"),
        )
        if granted and period_us:
            yield granted / period_us


def _groups(sys: Path, proc: Path, controller: str) -> list[Path]:
    """List this process's cgroup of a controller ("": v2) and its parents. A container may show any part of them."""
    path = ""
    for line in read_text(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, where = rest.partition(":")
        if controllers == controller or (controller and controller in controllers.split(",")):
            path = where.strip("/")
    root = sys / "fs/cgroup" / controller
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
