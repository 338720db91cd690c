"""Measure one run over several processes, runs at once, and the driver: `make bench SCALE=1`.

Every arrangement keeps its processes, and they take turns (A B A B), so that drift of the machine affects all alike. On
a CPU the processes of an arrangement divide the cores; on cards each has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bench.case_step import model_config, random_batch
from bench.cases import Sizes
from bench.runner import LIMIT_SECONDS
from bench.suite import Suite, SuiteResult, SuiteSession
from bench.suites import executors
from bench.suites.executors import ITERATIONS, WARM_UP_STEPS
from bench.tables import INTERVAL, ResultTable, format_spread, spread
from bench.workers import BenchWorker
from gpt2.config.batch import plan_batch
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import attention_kernels
from gpt2.hardware.torch_devices import list_in_child
from gpt2.system import ranks
from gpt2.system.errors import UserError
from gpt2.system.rank_launcher import free_port
from gpt2.train.clocks import device_synchroniser
from gpt2.train.step import Stepper
from study.executors.child_process import KEEP_HEAP

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class ScaledShape(Sizes):
    """A model, and the sequences of an update and of a micro-batch."""

    effective: int
    micro: int


SHAPES = {
    "cpu": ScaledShape("6x384-t256", 6, 6, 384, 256, 8, 2),
    "card": ScaledShape("124m-t1024", 12, 12, 768, 1024, 256, 32),
}


@dataclass(frozen=True)
class Arrangement:
    """Processes that train together on the same updates."""

    name: str
    ranks: int
    sharded: bool = False

    @contextlib.contextmanager
    def open(self, shape: ScaledShape) -> Iterator[Callable[[float], float]]:
        """Start the processes; yield a function that trains for so many seconds and returns tokens per second."""
        port = free_port()
        with contextlib.ExitStack() as stack:
            workers = [
                stack.enter_context(BenchWorker(f"{self.name}, rank {number}", KEEP_HEAP))
                for number in range(self.ranks)
            ]
            pool = stack.enter_context(ThreadPoolExecutor(self.ranks))

            def measure(seconds: float) -> float:
                calls = [
                    pool.submit(
                        worker.call, time_rank, number, port, self, shape, seconds,
                        limit_seconds=LIMIT_SECONDS + 10 * seconds,
                    )
                    for number, worker in enumerate(workers)
                ]  # fmt: skip
                speed, *_ = [call.result() for call in calls]
                return speed

            yield measure


BASELINE = Arrangement("1 rank", 1)


def arrangements(cards: int) -> tuple[Arrangement, ...]:
    """Return the arrangements of a machine with so many cards; 0: a CPU."""
    most = cards or 2
    counts = [count for count in (2, 4, 8) if count <= most]
    found = [Arrangement(f"{count} ranks", count) for count in counts]
    found += [Arrangement(f"{count} ranks, sharded", count, sharded=True) for count in counts[-1:]]
    return (BASELINE, *found)


@functools.cache
def prepare_rank(number: int, port: int, arrangement: Arrangement, shape: ScaledShape) -> tuple[Stepper, Any]:
    """Join the other ranks, build the model and run warm-up steps, once in a process."""
    count = arrangement.ranks
    variables = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    target = dataclasses.replace(ANY_TARGET, ranks=count)
    resolved = attention_kernels.prepare_device(target, model_config(shape))
    ranks.join(resolved.device_type, TIMEOUT_SECONDS)
    batch = plan_batch(shape.effective, shape.micro, count, shape.block_size)
    stepper = executors.standard_stepper(shape, batch, resolved)
    if arrangement.sharded:
        stepper.shard()
    ids_ET = ranks.share(random_batch(shape, shape.effective, "cpu")).to(resolved.device)
    with attention_kernels.attention_context(resolved):
        for iteration in range(WARM_UP_STEPS):
            stepper.step(ids_ET, iteration, ITERATIONS)
    return stepper, (ids_ET, resolved)


def time_rank(number: int, port: int, arrangement: Arrangement, shape: ScaledShape, seconds: float) -> float:
    """Train for so many seconds as one of the ranks; return the tokens per second of all."""
    stepper, (ids_ET, resolved) = prepare_rank(number, port, arrangement, shape)
    synchronise = device_synchroniser(resolved.device)
    ranks.agree()
    began, steps = time.perf_counter(), 0
    with attention_kernels.attention_context(resolved):
        while not steps or any(ranks.agree(time.perf_counter() - began < seconds)):
            stepper.step(ids_ET, steps, ITERATIONS)
            steps += 1
        synchronise()
    return steps * stepper.batch.tokens / (time.perf_counter() - began)


def run(session: SuiteSession) -> SuiteResult:
    """Measure every arrangement once a round."""
    cards = 0 if session.on_cpu else len([gpu for gpu in list_in_child().gpus if not gpu.integrated])
    if cards == 1:
        raise UserError("one card is not enough to measure several ranks; fix: use a machine with two")
    shape = SHAPES[session.resolved.device_class]
    measured = arrangements(cards)
    samples: dict[str, list[float]] = {each.name: [] for each in measured}
    data = {"shape": dataclasses.asdict(shape), "cards": cards, "tokens_per_second": samples}
    with contextlib.ExitStack() as stack:
        turns = [(each.name, stack.enter_context(each.open(shape))) for each in measured]
        for number in range(session.rounds):
            for name, measure in turns:
                samples[name].append(measure(session.seconds))
                session.say(f"round {number + 1}/{session.rounds}  {name}: {samples[name][-1]:,.0f} tok/s")
            session.save(data)
    more = executors.run(session)
    return SuiteResult(data | dict(more.data), (table(shape, samples), *more.tables), more.notes)


def table(shape: ScaledShape, samples: dict[str, list[float]]) -> ResultTable:
    """List the speed of each arrangement and its ratio to one rank, taken within a round."""
    base = samples[BASELINE.name]
    rows = []
    for name, speeds in samples.items():
        ratios = [speed / alone for speed, alone in zip(speeds, base, strict=True)]
        ratio = "-" if name == BASELINE.name else format_spread(spread(ratios))
        rows.append((name, format_spread(spread(speeds), ",.0f"), ratio))
    title = f"one run of {shape.name}, {shape.effective} sequences an update, micro-batch {shape.micro}"
    return ResultTable(title, ("processes", "tok/s", f"to {BASELINE.name}"), tuple(rows), (INTERVAL,))


SUITE = Suite(
    "scale",
    "tokens/s of one run over 1, 2 and more processes, of runs at once, and the cost of the driver",
    run,
    rounds={"cpu": 6, "card": 6},
    seconds={"cpu": 10.0, "card": 10.0},
)
