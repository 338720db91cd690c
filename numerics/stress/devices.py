"""Start a worker for each device of this machine, or of this rank."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from numerics.errors import NumericsError
from numerics.stress.kernels import kernels
from numerics.stress.station import Flip
from numerics.stress.worker import ProcessWorker


def default_devices(processes: int = 1) -> list[str]:
    """Return every accelerator, of a rank its own one; without accelerators `processes` times the CPU."""
    if not torch.accelerator.is_available():
        return ["cpu"] * processes
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    count = torch.accelerator.device_count()
    local = os.environ.get("LOCAL_RANK", "")
    numbers = [int(local)] if local.isdigit() and int(local) < count else range(count)
    return [f"{kind.type}:{number}" for number in numbers]


def label() -> str:
    """Return a name for this machine, with the rank where it is one of several: part of a file name."""
    rank = os.environ.get("RANK", "")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname()).strip("-.") or "machine"
    return f"{name}-rank{rank}" if rank.isdigit() else name


def parse_fault(text: str, count: int) -> tuple[int, Flip]:
    """Parse DEVICE:RATE:BIT, a simulated fault. NumericsError where it is none."""
    found = re.fullmatch(r"(\d+):(0?\.\d+|[01](?:\.0*)?):(\d{1,2})", text)
    if not found or int(found[1]) >= count or int(found[3]) > 62:
        raise NumericsError(
            f"--simulate {text} is not a fault; fix: DEVICE:RATE:BIT, such as 0:0.01:20, with a device below {count}"
        )
    return int(found[1]), Flip(float(found[2]), int(found[3]), seed=1)


@contextmanager
def workers(
    devices: Sequence[str], memory_bytes: int | None = None, faults: dict[int, Flip] | None = None
) -> Iterator[list[ProcessWorker]]:
    """Start a process for each device. NumericsError where one cannot be used."""
    names = [
        f"{device} process {number}" if devices.count(device) > 1 else device
        for number, device in enumerate(devices)
    ]
    threads = max(1, torch.get_num_threads() // max(len(devices), 1))
    found = []
    try:
        for number, (name, device) in enumerate(zip(names, devices, strict=True)):
            found.append(ProcessWorker(name, device, threads, memory_bytes, (faults or {}).get(number)))
        for worker in found:
            worker.start()
        yield found
    finally:
        for worker in found:
            worker.close()


def kernel_names(devices: Sequence[str], memory_bytes: int | None = None) -> list[str]:
    """Return the kernels that every device runs."""
    kinds = {torch.device(device).type for device in devices}
    listed = [[kernel.name for kernel in kernels(kind, memory_bytes)] for kind in sorted(kinds)]
    return [name for name in listed[0] if all(name in other for other in listed[1:])]
