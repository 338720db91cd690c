"""A device under stress, in this process: it runs kernels and compares the digests of their results."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from numerics.describe import device_name
from numerics.record.tensor_digest import bits_of, digest
from numerics.stress.exchanges import Exchange, Exchanged, Exchanges, connect_processes
from numerics.stress.kernels import Kernel, kernels

MOST_OUTPUTS = 4  # deviating results of a batch that are returned with their values
MOST_VALUES = 1 << 24  # elements of a returned result
LARGE_BYTES = 1 << 26  # larger results are read one by one


@dataclass(frozen=True)
class Flip:
    """A simulated fault: each result has, with probability `rate`, one flipped bit at a random element."""

    rate: float
    bit: int
    seed: int = 0


@dataclass(frozen=True)
class Deviation:
    """A result that is not golden. at: seconds since the epoch. output: its values, on the CPU; None where dropped."""

    repetition: int
    at: float
    digest: int
    output: Tensor | None = None


@dataclass(frozen=True)
class KernelRepetitions:
    """Repetitions of a kernel on a device. digests: in the order of the repetitions.

    outputs: where several digests differ and none is golden yet, the first values of each, on the CPU.
    """

    kernel: str
    digests: tuple[int, ...]
    seconds: float
    deviations: list[Deviation] = field(default_factory=list)
    outputs: dict[int, Tensor] = field(default_factory=dict)


class Station:
    """Runs kernels on one device. fault: a simulated one. golden: digest by kernel, once they are elected."""

    def __init__(self, device: str, memory_bytes: int | None = None, fault: Flip | None = None) -> None:
        self.device, self.fault = device, fault
        self.kernels: dict[str, Kernel] = {
            kernel.name: kernel for kernel in kernels(torch.device(device).type, memory_bytes)
        }
        self.golden: dict[str, int] = {name: 0 for name, kernel in self.kernels.items() if kernel.exact}
        self._inputs: dict[str, tuple[Tensor, ...]] = {}
        self._random = torch.Generator().manual_seed(fault.seed if fault else 0)
        self.exchanges: Exchanges | None = None

    def connect(self, rank: int, world: int, port: int, groups: Sequence[Sequence[int]]) -> None:
        """Join the other devices, which call it at the same time."""
        connect = connect_processes(rank, world, port, self.device)
        self.exchanges = Exchanges(rank, self.device, connect, self._disturbed)
        self.exchanges.join(groups)

    def exchange(
        self, exchange: Exchange, world: tuple[int, ...], repetitions: int, devices: Sequence[str]
    ) -> Exchanged:
        """Repeat an exchange, as its other members do at the same time."""
        assert self.exchanges
        return self.exchanges.batch(exchange, world, repetitions, devices)

    def result(self, name: str) -> Tensor:
        """Run a kernel once."""
        kernel = self.kernels[name]
        if name not in self._inputs:
            if kernel.exact:  # one buffer at a time: it may be a large part of the memory
                self._inputs = {
                    key: value for key, value in self._inputs.items() if not self.kernels[key].exact
                }
            self._inputs[name] = kernel.inputs(self.device)
        with torch.no_grad():
            output = kernel.run(*self._inputs[name])
        return self._disturbed(output)

    def batch(self, name: str, repetitions: int) -> KernelRepetitions:
        """Repeat a kernel. Results are read when the last one is computed, so that the device never waits."""
        began = time.monotonic()
        pending: list[tuple[int, float, Tensor, Tensor]] = []
        deviations: list[Deviation] = []
        outputs: dict[int, Tensor] = {}
        order: list[int] = []
        for number in range(repetitions):
            output = self.result(name)
            pending.append((number, time.time(), digest(output), output))
            if len(pending) == 8 or output.nbytes > LARGE_BYTES or number == repetitions - 1:
                for repetition, at, value, kept in pending:
                    found = int(value)
                    order.append(found)
                    if (
                        name not in self.golden
                        and len(outputs) < MOST_OUTPUTS
                        and kept.numel() <= MOST_VALUES
                    ):
                        outputs.setdefault(found, kept.cpu())
                    if name in self.golden and found != self.golden[name]:
                        small = len(deviations) < MOST_OUTPUTS and kept.numel() <= MOST_VALUES
                        deviations.append(Deviation(repetition, at, found, kept.cpu() if small else None))
                pending.clear()
        outputs = outputs if len(set(order)) > 1 else {}
        return KernelRepetitions(name, tuple(order), time.monotonic() - began, deviations, outputs)

    def golden_output(self, name: str, tries: int = 20) -> Tensor | None:
        """Return a result whose digest is golden, on the CPU; None where this device gives none."""
        for _ in range(tries):
            output = self.result(name)
            if output.numel() <= MOST_VALUES and int(digest(output)) == self.golden.get(name):
                return output.cpu()
        return None

    def _disturbed(self, output: Tensor) -> Tensor:
        fault = self.fault
        if fault is None or float(torch.rand((), generator=self._random)) >= fault.rate:
            return output
        output = output.clone(memory_format=torch.contiguous_format)
        index = int(torch.randint(output.numel(), (), generator=self._random))
        bits = bits_of(output)
        bits[index] ^= 1 << (fault.bit % (bits.element_size() * 8 - 1))
        return output


def device_kind(device: str) -> str:
    """Return the model of the device and the version of torch: devices of one kind have equal results."""
    kind = torch.device(device).type
    if kind == "cpu":
        name = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    else:
        name = device_name(kind, torch.device(device).index or 0)
    return f"{name}, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
