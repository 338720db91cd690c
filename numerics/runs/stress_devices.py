"""Find a faulty device: repeat computations whose results must be equal to the bit, on each device and on all at once.

The golden result of a computation is that of more than half of the first results of all devices. Inputs are drawn on
the CPU from a seed, so that all devices of a kind, on all machines, have the same golden results.
"""

from __future__ import annotations

import contextlib
import datetime
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from numerics.describe import device_name
from numerics.errors import NumericsError
from numerics.record.tensor_digest import bits_of, digest
from numerics.rows import TableRow
from numerics.seed import process_environment

FIRST_RESULTS = 5  # of each device, which elect the golden result
BATCH_SECONDS = 0.5
MOST_REPETITIONS = 1000  # of a batch
PATIENCE_SECONDS = 600.0  # for an answer; a device that hangs is lost
Progress = Callable[[float, str], None]


class Flip(NamedTuple):
    """A simulated fault: each result of device number `rank` has, with probability `rate`, one flipped bit."""

    rank: int
    rate: float
    bit: int


class BatchResults(NamedTuple):
    """The results of a batch on a device. first: how the first deviation differs from a golden result."""

    digests: list[int]
    seconds: float
    first: str = ""


@dataclass
class ResultCounts:
    """The results of a computation on a device, of which `deviations` are not golden. first: the first of these."""

    results: int = 0
    deviations: int = 0
    first: str = ""


@dataclass
class Stressed:
    """The result of a stress. counts: (device, computation) -> results. lost: device -> reason."""

    devices: list[str]
    kind: str = ""
    golden: dict[str, int | None] = field(default_factory=dict)
    counts: dict[tuple[str, str], ResultCounts] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    @property
    def faulty(self) -> list[str]:
        """Return the devices with a deviation or without an answer."""
        wrong = {device for (device, _), counts in self.counts.items() if counts.deviations}
        return [device for device in self.devices if device in wrong or device in self.lost]

    def rows(self) -> list[TableRow]:
        """Return a row for each computation that deviates on a device, has no golden result, or lost its device."""
        rows = [
            TableRow(
                computation, device, counts.first, f"{counts.deviations} of {counts.results}", "0", math.nan
            )
            for (device, computation), counts in self.counts.items()
            if counts.deviations
        ]
        rows += [
            TableRow(name, target="no majority", units=math.nan)
            for name, value in self.golden.items()
            if value is None
        ]
        return rows + [
            TableRow("", device, reason, "no answer", units=math.nan) for device, reason in self.lost.items()
        ]


# -- one device, in a process of its own


class StressedDevice:
    """Runs computations on one device."""

    def __init__(self, device: str, rank: int, world: int, fault: Flip | None) -> None:
        self.device, self.fault = device, fault if fault and fault.rank == rank else None
        self.computations = computations(device, world)
        self._inputs: dict[str, tuple[Tensor, ...]] = {}
        self._random = torch.Generator().manual_seed(1)

    def result(self, name: str) -> Tensor:
        make, run = self.computations[name]
        if name not in self._inputs:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self._inputs = {name: tuple(value.to(self.device) for value in make(generator))}
        with torch.no_grad():
            return self._disturbed(run(*self._inputs[name]))

    def batch(self, name: str, repetitions: int, golden: int | None) -> BatchResults:
        began, digests, first = time.monotonic(), [], ""
        for _ in range(repetitions):
            output = self.result(name)
            digests.append(int(digest(output)))
            if golden is not None and digests[-1] != golden and not first and name != ALL_REDUCE:
                first = self._difference(name, output, golden)
        return BatchResults(digests, time.monotonic() - began, first)

    def _difference(self, name: str, output: Tensor, golden: int) -> str:
        """Describe how an output differs from a golden one, which is computed again."""
        outputs = (self.result(name) for _ in range(20))
        good = next((value for value in outputs if int(digest(value)) == golden), None)
        if good is None:
            return "no golden result on this device"
        flipped = bits_of(output).cpu() ^ bits_of(good).cpu()
        places = flipped.nonzero().flatten().tolist()
        if not places:
            return "the same values, another hash of them"
        bits = [
            bit for bit in range(64) if int(flipped[places[0]]) >> bit & 1 and bit < 8 * output.element_size()
        ]
        return f"{len(places)} of {len(flipped)} differ: element {places[0]}, bits {bits}"

    def _disturbed(self, output: Tensor) -> Tensor:
        if self.fault is None or float(torch.rand((), generator=self._random)) >= self.fault.rate:
            return output
        output = output.clone(memory_format=torch.contiguous_format)
        bits = bits_of(output)
        index = int(torch.randint(len(bits), (), generator=self._random))
        bits[index] ^= 1 << (self.fault.bit % (8 * bits.element_size() - 1))
        return output


ALL_REDUCE = "all_reduce"
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
        station = StressedDevice(device, rank, world, fault)
        pipe.send(device_kind(device))
        while True:
            pipe.send(station.batch(*pipe.recv()))
    except (EOFError, OSError):
        return
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


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


# -- all devices


def stress(
    devices: Sequence[str],
    minutes: float = 10.0,
    fault: Flip | None = None,
    progress: Progress = lambda share, text: None,
) -> Stressed:
    """Repeat the computations on each device alone and on all together. NumericsError for a device without torch.

    devices: torch's names; a name may occur several times. progress: receives the finished share and a text.
    """
    names = [f"{name} process {n}" if devices.count(name) > 1 else name for n, name in enumerate(devices)]
    outcome = Stressed(names)
    with _started(devices, fault) as pipes, contextlib.suppress(KeyboardInterrupt):
        outcome.kind, *others = [_answer(pipe, name) for pipe, name in zip(pipes, names, strict=True)]
        if other := next((kind for kind in others if kind != outcome.kind), None):
            raise NumericsError(
                f"{outcome.kind} and {other} have different results; fix: stress devices of one kind at a time"
            )
        began, each = time.monotonic(), dict[str, float]()
        while not outcome.lost:
            for computation in computations(devices[0], len(devices)):
                everyone = list(range(len(names)))
                together = computation == ALL_REDUCE or computation not in outcome.golden
                for ranks in [everyone] if together else [*([rank] for rank in everyone), everyone]:
                    share = (time.monotonic() - began) / (60 * minutes)
                    if share >= 1 and computation in outcome.golden:
                        return outcome
                    progress(min(share, 1.0), f"{computation}, {len(outcome.faulty)} faulty")
                    times = min(
                        max(int(BATCH_SECONDS / each.get(computation, 1.0)), FIRST_RESULTS), MOST_REPETITIONS
                    )
                    found = _batch(outcome, pipes, computation, ranks, times)
                    each[computation] = max((batch.seconds / times for batch in found), default=1.0)
    return outcome


@contextlib.contextmanager
def _started(devices: Sequence[str], fault: Flip | None) -> Iterator[list[Any]]:
    """Start a process for each device; yield their pipes."""
    context, before = multiprocessing.get_context("spawn"), dict(os.environ)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    os.environ.update(process_environment(before))  # cuBLAS reads its variable when it is loaded
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
        os.environ.clear()
        os.environ.update(before)
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


def _batch(
    outcome: Stressed, pipes: Sequence[Any], computation: str, ranks: Sequence[int], times: int
) -> list[BatchResults]:
    """Run a computation on the devices `ranks` at once and count the results. The first batch elects the golden one."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            pipes[rank].send((computation, times, outcome.golden.get(computation)))
    found: dict[int, BatchResults] = {}
    for rank in ranks:
        try:
            found[rank] = _answer(pipes[rank], outcome.devices[rank])
        except NumericsError as error:
            outcome.lost[outcome.devices[rank]] = f"{computation}: {error}".partition("; fix")[0]
    if computation not in outcome.golden:
        outcome.golden[computation] = majority([value for batch in found.values() for value in batch.digests])
    golden = outcome.golden[computation]
    for rank, batch in found.items():
        counts = outcome.counts.setdefault((outcome.devices[rank], computation), ResultCounts())
        counts.results += len(batch.digests)
        counts.deviations += 0 if golden is None else sum(value != golden for value in batch.digests)
        counts.first = counts.first or batch.first
    return list(found.values())


def majority(values: Sequence[Any]) -> Any:
    """Return the value of more than half; None where there is none."""
    counts = Counter(values).most_common(1)
    return counts[0][0] if counts and 2 * counts[0][1] > len(values) else None


def odd_machines(contents: dict[str, dict[str, Any]]) -> list[str]:
    """Return the machines whose golden results differ from those of most machines with the same kind of device.

    contents: machine -> its file: kind, and golden with computation -> digest.
    """
    odd = []
    for machine, content in contents.items():
        alike = [other["golden"] for other in contents.values() if other["kind"] == content["kind"]]
        for name, value in content["golden"].items():
            usual = majority([golden.get(name) for golden in alike])
            if usual is not None and value != usual and machine not in odd:
                odd.append(machine)
    return odd


def default_devices(processes: int = 1) -> list[str]:
    """Return every accelerator, of a rank its own; without accelerators `processes` times the CPU."""
    if not torch.accelerator.is_available():
        return ["cpu"] * processes
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    local = os.environ.get("LOCAL_RANK", "")
    numbers = [int(local)] if local.isdigit() and int(local) < count else range(count)
    return [f"{kind.type}:{number}" for number in numbers if kind]


def parse_fault(text: str, count: int) -> Flip:
    """Parse DEVICE:RATE:BIT, a simulated fault. NumericsError where it is none."""
    found = re.fullmatch(r"(\d+):(0?\.\d+|[01](?:\.0*)?):(\d{1,2})", text)
    if not found or int(found[1]) >= count or int(found[3]) > 62:
        raise NumericsError(
            f"--simulate {text} is not a fault; fix: DEVICE:RATE:BIT, such as 0:0.01:20, with a device below {count}"
        )
    return Flip(int(found[1]), float(found[2]), int(found[3]))
