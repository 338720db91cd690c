"""Divide this machine among runs at once: a card for each, or a share of the processor's cores."""

from __future__ import annotations

import os
from collections.abc import Mapping

from runtime.cpu import SYS, cpu_threads, read_text
from runtime.errors import UserError
from runtime.resolve import ResolvedTarget
from runtime.run_plan import micro_batches
from runtime.torch_devices import TorchDevices, list_in_child
from study.executors.child_process import Slot

VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
RUN_BYTES = 2**30  # of a run of small steps: about 0.4 GiB of Python and torch, and up to 0.25 GiB of a step


class SlotsError(UserError, RuntimeError):
    """This machine has no place for that many runs at once."""


def local_slots(
    wanted: int,
    resolved: ResolvedTarget,
    threads: int,
    ranks: int = 1,
    effective: int = 1,
    small: bool = False,
) -> list[Slot]:
    """Return `wanted` slots of this machine. 0: one per card; on a CPU as many as fit if steps are small, else one.

    threads: of a run; 0: its share of the cores. small: whether a run uses few threads well.
    ranks: processes of a run; a run of several has the whole machine. effective: batch, which the ranks divide.
    One slot is the whole machine. SlotsError where there are too few cards of the study's kind, or too few cores.
    """
    if ranks > 1 and wanted > 1:
        raise SlotsError(
            f"CONFIG_SLOTS={wanted} and CONFIG_RANKS={ranks}: a run of several processes uses the whole machine; "
            "fix: CONFIG_SLOTS=1 or CONFIG_RANKS=1"
        )
    if ranks > 1 and resolved.device_type == "cpu":
        require_cores(ranks, threads, effective, len(cores()))
    if ranks == 1 and resolved.device_type == "cpu":
        # without affinity, runs that know their threads share the cores unbound
        found = cores() or [frozenset()] * (cpu_threads(0) if threads else 0)
        wanted = wanted or runs_that_fit(threads, len(found), resolved.memory_bytes, small)
        return [Slot("")] if wanted == 1 else cpu_slots(wanted, threads, found)
    if wanted == 1 or ranks > 1:
        return [Slot("")]
    return card_slots(wanted, resolved, list_in_child())


def runs_that_fit(threads: int, found: int, memory_bytes: int, small: bool) -> int:
    """Return the runs at once on a CPU with `found` cores: one, or for small steps as many as have cores and memory."""
    return max(1, min(found // max(threads, 1), memory_bytes // RUN_BYTES)) if small else 1


def cores() -> list[frozenset[int]]:
    """Return the logical CPUs of each physical core that this process may use, within a container's quota."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    groups: dict[str, set[int]] = {}
    for cpu in allowed:
        siblings = read_text(SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        groups.setdefault(siblings or str(cpu), set()).add(cpu)
    return [frozenset(group) for group in groups.values()][: cpu_threads(0)]


def require_cores(ranks: int, threads: int, effective: int, found: int) -> None:
    """SlotsError where a machine with `found` cores has fewer than the threads of all ranks."""
    need = ranks * max(threads, 1)
    if need <= found:
        return
    asked = f"CONFIG_RANKS={ranks}" + (f" x CONFIG_CPU_THREADS={threads}" if threads else "")
    fitting = [n for n in micro_batches(effective, 1) if n * max(threads, 1) <= found] or [1]
    fewer = f", or in a new study CONFIG_CPU_THREADS={found // ranks}" if threads and ranks <= found else ""
    raise SlotsError(
        f"{asked} needs {need} cores, and {found} are available; a run with fewer cores than threads is many times "
        f"slower; fix: use CONFIG_RANKS={', '.join(map(str, fitting[-4:]))}{fewer}"
    )


def threads_notice(resolved: ResolvedTarget, threads: int, found: int) -> str:
    """Return a notice where one process has more threads than the `found` cores; else ""."""
    if resolved.device_type != "cpu" or threads <= found:
        return ""
    return (
        f"notice: CONFIG_CPU_THREADS={threads}, but {found} cores are available: runs are slower than with {found} "
        f"threads; to use {found}, start a new study with CONFIG_CPU_THREADS={found}"
    )


def cpu_slots(wanted: int, threads: int, found: list[frozenset[int]]) -> list[Slot]:
    """Return slots of equally many cores. found: the logical CPUs of each core."""
    each = len(found) // wanted
    if each < max(threads, 1):
        need = f"{wanted} x CONFIG_CPU_THREADS={threads}" if threads else f"CONFIG_SLOTS={wanted}"
        raise SlotsError(
            f"{need} needs {wanted * max(threads, 1)} cores, and {len(found)} are available; a run with fewer cores "
            f"than threads is many times slower; fix: CONFIG_SLOTS={max(1, len(found) // max(threads, 1))}"
        )
    return [
        Slot(f"slot {number}", cpus=frozenset().union(*found[number * each : (number + 1) * each]))
        for number in range(wanted)
    ]


def card_slots(
    wanted: int,
    resolved: ResolvedTarget,
    devices: TorchDevices,
    environment: Mapping[str, str] = os.environ,
) -> list[Slot]:
    """Return slots of one card each, all of the study's kind. wanted: 0 for all of them."""
    alike = [
        gpu
        for gpu in devices.gpus
        if not gpu.integrated
        and (gpu.name, gpu.memory_bytes) == (resolved.device_name, resolved.memory_bytes)
    ]
    wanted = wanted or len(alike)
    if wanted > len(alike):
        others = [gpu.name for gpu in devices.gpus if gpu not in alike]
        rest = f" (not used: {', '.join(others)}, since a study has one kind of card)" if others else ""
        raise SlotsError(
            f"CONFIG_SLOTS={wanted} needs {wanted} cards, and this machine has {len(alike)} x "
            f"{resolved.device_name}{rest}; fix: CONFIG_SLOTS={max(1, len(alike))}"
        )
    if wanted == 1:
        return [Slot("")]
    known = VARIABLES[devices.kind]
    variable = next((name for name in known if name in environment), known[0])
    visible = [entry.strip() for entry in environment.get(variable, "").split(",") if entry.strip()]
    entries = [visible[gpu.index] if visible else str(gpu.index) for gpu in alike[:wanted]]
    return [Slot(f"card {entry}", {variable: entry}) for entry in entries]
