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


def _serve(pipe: Any, device: str, rank: int, world: int, port: int, fault: Flip | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ.update(process_environment(os.environ))  # before cuBLAS and HCCL start
    try:
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
        worker = StressedDevice(device, rank, world, fault)
        pipe.send(device_kind(device))
        while True:
            pipe.send(worker.batch(pipe.recv()))
    except (EOFError, OSError):
        return
    except Exception as error:
        pipe.send(RuntimeError(described(error)))


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
    outcome = Stressed(names)
    with _started(devices, fault) as pipes, contextlib.suppress(KeyboardInterrupt):
        outcome.kind, *others = [_answer(pipe, name) for pipe, name in zip(pipes, names, strict=True)]
        if other := next((kind for kind in others if kind != outcome.kind), None):
            raise NumericsError(
                f"{outcome.kind} and {other} have different results; fix: stress devices of one kind at a time"
            )
        end = time.monotonic() + 60 * minutes
        for computation in itertools.cycle(computations(devices[0], len(devices))):
            if outcome.lost or (time.monotonic() >= end and computation in outcome.golden):
                break
            _batch(outcome, pipes, computation)
    return outcome


def _batch(outcome: Stressed, pipes: Sequence[Any], computation: str) -> None:
    """Run a computation on all devices at once and count the results."""
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(computation)
    answers = {}
    for pipe, device in zip(pipes, outcome.devices, strict=True):
        try:
            answers[device] = _answer(pipe, device)
        except NumericsError as error:
            outcome.lost[device] = f"{computation}: {error}".partition("; fix")[0]
    outcome.count(computation, answers)


@contextlib.contextmanager
def _started(devices: Sequence[str], fault: Flip | None) -> Iterator[list[Any]]:
    """Start a process for each device; yield their pipes."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    try:
        for rank, device in enumerate(devices):
            ours, theirs = context.Pipe()
            arguments = (theirs, device, rank, len(devices), port, fault)
            processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        yield pipes
    finally:
        for process in processes:
            process.kill()


def _answer(pipe: Any, device: str) -> Any:
    """Return the answer of a device. NumericsError where there is none."""
    try:
        answer = pipe.recv() if pipe.poll(PATIENCE_SECONDS) else TimeoutError(f"in {PATIENCE_SECONDS:g} s")
    except (EOFError, OSError):
        answer = EOFError("its process ended")
    if isinstance(answer, Exception):
        raise NumericsError(f"{device} gives no answer: {answer}; fix: name devices that torch can use")
    return answer


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
