"""Find a faulty device: repeat computations whose results must be equal to the bit, on all devices at once.

The golden result of a computation is that of more than half of the first results of all devices. Inputs are drawn on
the CPU from a seed, so that all devices of a kind, on all machines, have the same golden results.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import multiprocessing
import os
import platform
import re
import signal
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from referee.errors import NumericsError, described
from referee.numerics.describe import device_name
from referee.numerics.record.tensor_statistics import bits_of, digest
from referee.numerics.rows import TableRow
from referee.numerics.seed import process_environment

BATCH = 16  # results of a device between two questions
PATIENCE_SECONDS = 600.0  # for an answer; a device that hangs is lost
ALL_REDUCE = "all_reduce"


class Flip(NamedTuple):
    """A simulated fault: each result of device number `rank` has, with probability `rate`, one flipped bit."""

    rank: int
    rate: float
    bit: int


@dataclass
class Stressed:
    """The result of a stress. kind: of the devices. counts: (computation, device) -> number."""

    devices: list[str]
    kind: str = ""
    golden: dict[str, int | None] = field(default_factory=dict)  # computation -> digest; None: no majority
    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    deviations: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: dict[str, str] = field(default_factory=dict)  # device -> why it gives no answer

    @property
    def faulty(self) -> list[str]:
        """Return the devices with a deviation or without an answer."""
        wrong = {device for _, device in self.deviations}
        return [device for device in self.devices if device in wrong or device in self.lost]

    def count(self, computation: str, answers: Mapping[str, list[int]]) -> None:
        """Count the results of devices. answers: device -> digests."""
        golden = self.golden.setdefault(
            computation, majority([value for digests in answers.values() for value in digests])
        )
        for device, digests in answers.items():
            self.results[computation, device] += len(digests)
            if wrong := 0 if golden is None else sum(value != golden for value in digests):
                self.deviations[computation, device] += wrong

    def rows(self) -> list[TableRow]:
        """Return a row for each computation that deviates on a device, has no golden result, or lost its device."""
        rows = [
            TableRow(*key, "", f"{wrong} of {self.results[key]}", "0", math.nan)
            for key, wrong in self.deviations.items()
        ]
        undecided = [name for name, value in self.golden.items() if value is None]
        rows += [TableRow(name, target="no majority", units=math.nan) for name in undecided]
        lost = self.lost.items()
        return rows + [TableRow("", device, reason, "no answer", units=math.nan) for device, reason in lost]


class StressedDevice:
    """Runs computations on one device, in a process of its own."""

    def __init__(self, device: str, rank: int, world: int, fault: Flip | None) -> None:
        self.device, self.fault = device, fault if fault and fault.rank == rank else None
        self.computations = computations(device, world)
        self._inputs: dict[str, list[Tensor]] = {}
        self._random = torch.Generator().manual_seed(1)

    def batch(self, name: str) -> list[int]:
        """Return digests of results."""
        return [int(digest(self.result(name))) for _ in range(BATCH)]

    @torch.no_grad()
    def result(self, name: str) -> Tensor:
        make, run = self.computations[name]
        if name not in self._inputs:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self._inputs[name] = [value.to(self.device) for value in make(generator)]
        output = run(*self._inputs[name])
        if self.fault and float(torch.rand((), generator=self._random)) < self.fault.rate:
            output = output.clone(memory_format=torch.contiguous_format)
            bits = bits_of(output)
            index = int(torch.randint(len(bits), (), generator=self._random))
            bits[index] ^= 1 << (self.fault.bit % (8 * bits.element_size() - 1))
        return output


Computation = tuple[Callable[[torch.Generator], tuple[Tensor, ...]], Callable[..., Tensor]]


def computations(device: str, world: int) -> dict[str, Computation]:
    """Return name -> (inputs on the CPU, result on the device of its inputs)."""
    is_cpu = torch.device(device).type == "cpu"
    size, dtype = (256, torch.float32) if is_cpu else (4096, torch.bfloat16)

    def values(count: int, *shape: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
        return lambda generator: tuple(
            torch.randn(shape, generator=generator).to(dtype) for _ in range(count)
        )

    def integers(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(-(2**40), 2**40, (size, size), generator=generator),)

    found: dict[str, Computation] = {
        "matrix product": (values(2, size, size), torch.matmul),
        "attention": (
            values(3, 2, 4, size, 64),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        "copy": (integers, lambda x: x.t().contiguous().t().cpu().clone().to(x.device)),
    }
    return found | ({ALL_REDUCE: (integers, _all_reduce)} if world > 1 else {})


def _all_reduce(x: Tensor) -> Tensor:
    total = x.clone()
    distributed.all_reduce(total)  # of integers, which each order of the sum gives to the bit
    return total


_device: StressedDevice  # of this process


def _start(device: str, rank: int, world: int, port: int, fault: Flip | None) -> str:
    """Prepare this process. Returns the kind of its device."""
    global _device
    os.environ.update(process_environment(os.environ))  # before cuBLAS and HCCL start
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.zeros(1, device=device)
    if world > 1:
        if torch.device(device).type != "cpu":
            torch.accelerator.set_device_index(torch.device(device).index or 0)
        distributed.init_process_group(
            distributed.get_default_backend_for_device(device),
            init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
            timeout=datetime.timedelta(seconds=PATIENCE_SECONDS),
        )  # fmt: skip
    _device = StressedDevice(device, rank, world, fault)
    return device_kind(device)


def _batch(computation: str) -> list[int]:
    return _device.batch(computation)


def device_kind(device: str) -> str:
    """Return the model of the device and the version of torch: devices of one kind have equal results."""
    kind, index = torch.device(device).type, torch.device(device).index or 0
    if kind == "cpu":
        listed = Path("/proc/cpuinfo")
        text = listed.read_text(encoding="utf-8") if listed.exists() else ""
        model = re.search(r"model name\s*: (.*)", text)
        name = f"{model[1] if model else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    else:
        name = device_name(kind, index)
    return f"{name}, torch {torch.__version__}"


def stress(devices: Sequence[str], minutes: float = 10.0, fault: Flip | None = None) -> Stressed:
    """Repeat the computations on all devices at once. NumericsError for devices that torch cannot use, or of two kinds.

    devices: torch's names; a name may occur several times.
    """
    names = [f"{name} process {n}" if devices.count(name) > 1 else name for n, name in enumerate(devices)]
    outcome, world = Stressed(names), len(devices)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _processes(names) as pools, contextlib.suppress(KeyboardInterrupt):
        starts = [(device, rank, world, port, fault) for rank, device in enumerate(devices)]
        kinds = _ask(pools, _start, starts)
        for name, kind in kinds.items():
            if isinstance(kind, Exception):
                raise NumericsError(
                    f"{name} gives no answer: {described(kind)}; fix: name devices that torch can use"
                )
        outcome.kind, *others = kinds.values()
        if other := next((kind for kind in others if kind != outcome.kind), None):
            raise NumericsError(
                f"{outcome.kind} and {other} have different results; fix: stress devices of one kind at a time"
            )
        end = time.monotonic() + 60 * minutes
        for computation in itertools.cycle(computations(devices[0], world)):
            if outcome.lost or (time.monotonic() >= end and computation in outcome.golden):
                break
            answers = _ask(pools, _batch, [(computation,)] * world)
            errors = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
            outcome.lost |= {name: f"{computation}: {described(error)}" for name, error in errors.items()}
            outcome.count(computation, {name: answers[name] for name in answers if name not in errors})
    return outcome


@contextlib.contextmanager
def _processes(names: Sequence[str]) -> Iterator[dict[str, ProcessPoolExecutor]]:
    """Yield a process for each device, which the parent ends, also where it hangs."""
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    pools = {name: ProcessPoolExecutor(1, context, signal.signal, ignore) for name in names}
    try:
        yield pools
    finally:
        for pool in pools.values():
            for process in list(pool._processes.values()):
                process.kill()
            pool.shutdown(wait=False)


def _ask(
    pools: Mapping[str, ProcessPoolExecutor], call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
) -> dict[str, Any]:
    """Call a function in all processes at once. Returns the answer of each, or the exception."""
    running = {name: pools[name].submit(call, *given) for name, given in zip(pools, arguments, strict=True)}
    found: dict[str, Any] = {}
    for name, answer in running.items():
        try:
            found[name] = answer.result(PATIENCE_SECONDS)
        except Exception as error:  # torch's, a process that ended, or no answer in time
            found[name] = error
    return found


def majority(values: Sequence[Any]) -> Any:
    """Return the value of more than half; None where there is none."""
    counts = Counter(values).most_common(1)
    return counts[0][0] if counts and 2 * counts[0][1] > len(values) else None


def odd_machines(contents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the machines whose golden results are not those of most machines with the same kind of device.

    contents: machine -> its file: kind, and golden with computation -> digest.
    """
    odd = []
    for machine, content in contents.items():
        alike = [other["golden"] for other in contents.values() if other["kind"] == content["kind"]]
        usual = {name: majority([golden.get(name) for golden in alike]) for name in content["golden"]}
        if any(usual[name] not in (None, value) for name, value in content["golden"].items()):
            odd.append(machine)
    return odd


def default_devices() -> list[str]:
    """Return every accelerator, or that of this rank under torchrun; without accelerators twice the CPU."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ["cpu", "cpu"]
    count, local = torch.accelerator.device_count(), os.environ.get("LOCAL_RANK", "")
    numbers = [int(local)] if local.isdigit() and int(local) < count else range(count)
    return [f"{kind.type}:{number}" for number in numbers]


def parse_fault(text: str, count: int) -> Flip:
    """Parse DEVICE:RATE:BIT, a simulated fault. NumericsError where it is none."""
    found = re.fullmatch(r"(\d+):(0?\.\d+|[01](?:\.0*)?):(\d{1,2})", text)
    if not found or int(found[1]) >= count or int(found[3]) > 62:
        raise NumericsError(
            f"--simulate {text} is not a fault; fix: DEVICE:RATE:BIT, such as 0:0.01:20, with a device below {count}"
        )
    return Flip(int(found[1]), float(found[2]), int(found[3]))
