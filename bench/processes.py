"""Train in several processes at once, in arrangements that take turns: drift of the machine affects all alike.

Used by the suites `executors` and `scale`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.case_step import model_config, random_batch
from bench.cases import Sizes
from bench.runner import LIMIT_SECONDS
from bench.suite import INTERVAL, ResultTable, SuiteSession, format_spread, spread
from bench.workers import BenchWorker
from gpt2.clocks import device_synchroniser
from gpt2.training_step import Stepper
from runtime import attention_kernels, ranks
from runtime.resolve import ResolvedTarget
from runtime.run_plan import plan_batch
from runtime.settings import ANY_TARGET, OptimizerConfig
from study.executors.child_process import KEEP_HEAP

OPTIMIZER = OptimizerConfig(6e-4, 0.1, 0.05, 0.1, 0.9, 0.95, 1e-8, 1.0)
WARM_UP_STEPS, ITERATIONS = 2, 10**9
TIMEOUT_SECONDS = 600  # of a rank for another one
Name = TypeVar("Name", int, str)


@dataclass(frozen=True)
class TrainedShape(Sizes):
    """A model, and the sequences of an update and of a micro-batch."""

    effective: int
    micro: int


SHAPES = {
    "cpu": TrainedShape("6x384-t256", 6, 6, 384, 256, 8, 2),
    "card": TrainedShape("124m-t1024", 12, 12, 768, 1024, 256, 32),
}


@dataclass(frozen=True)
class Process:
    """One process. environment: its variables. cpus: logical CPUs; empty: all. ranks: of its run, which it joins."""

    label: str
    shape: TrainedShape
    environment: tuple[tuple[str, str], ...] = ()
    cpus: frozenset[int] = frozenset()
    ranks: int = 1


@functools.cache
def prepare(process: Process) -> tuple[Stepper, Any, ResolvedTarget]:
    """Build standard attention, not compiled, and run warm-up steps, once in a process. Returns the batch, too."""
    os.environ.update(process.environment)
    if process.cpus:
        os.sched_setaffinity(0, process.cpus)
    shape, model = process.shape, model_config(process.shape)
    resolved = attention_kernels.prepare_device(dataclasses.replace(ANY_TARGET, ranks=process.ranks), model)
    ranks.join(resolved.device_type, TIMEOUT_SECONDS)
    stepper = Stepper(
        model,
        OPTIMIZER,
        plan_batch(shape.effective, shape.micro, process.ranks, shape.block_size),
        seed=0,
        device=resolved.device,
        dtype=resolved.dtype,
        compile=False,
        parts=None,
    )
    ids_ET = ranks.share(random_batch(shape, shape.effective, "cpu")).to(resolved.device)
    with attention_kernels.attention_context(resolved):
        for iteration in range(WARM_UP_STEPS):
            stepper.step(ids_ET, iteration, ITERATIONS)
    return stepper, ids_ET, resolved


def warm_up(process: Process) -> None:
    prepare(process)


def time_process(process: Process, seconds: float) -> float:
    """Train for so many seconds; return the tokens per second of the run, which are those of all its ranks."""
    stepper, ids_ET, resolved = prepare(process)
    synchronise = device_synchroniser(resolved.device)
    ranks.agree()
    began, steps = time.perf_counter(), 0
    with attention_kernels.attention_context(resolved):
        while not steps or any(ranks.agree(time.perf_counter() - began < seconds)):
            stepper.step(ids_ET, steps, ITERATIONS)
            steps += 1
        synchronise()
    return steps * stepper.batch.tokens / (time.perf_counter() - began)


@contextlib.contextmanager
def open_processes(processes: Sequence[Process]) -> Iterator[Callable[[float], list[float]]]:
    """Start the processes; yield a function that trains in all at once and returns the speed of each."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(BenchWorker(one.label, KEEP_HEAP)) for one in processes]
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))

        def call(function: Callable[..., Any], *arguments: float) -> list[Any]:
            limit = LIMIT_SECONDS + 10 * sum(arguments)
            calls = [
                pool.submit(worker.call, function, process, *arguments, limit_seconds=limit)
                for worker, process in zip(workers, processes, strict=True)
            ]
            return [call.result() for call in calls]

        call(warm_up)
        yield lambda seconds: call(time_process, seconds)


def take_turns(
    session: SuiteSession,
    arranged: Mapping[Name, Sequence[Process]],
    record: Callable[[int, Name, list[float]], None],
) -> None:
    """Measure every arrangement once a round. record: takes the round from 1, its name and its processes' speeds."""
    with contextlib.ExitStack() as stack:
        turns = [(name, stack.enter_context(open_processes(each))) for name, each in arranged.items()]
        for number in range(1, session.rounds + 1):
            for name, measure in turns:
                record(number, name, measure(session.seconds))


def ratio_table(title: str, head: tuple[str, ...], totals: Mapping[Name, Sequence[float]]) -> ResultTable:
    """List the speed of each arrangement and its ratio to the first one, taken within a round."""
    base = next(iter(totals.values()))
    rows = []
    for number, (name, speeds) in enumerate(totals.items()):
        ratios = [speed / alone for speed, alone in zip(speeds, base, strict=True)]
        ratio = format_spread(spread(ratios)) if number else "-"
        rows.append((f"{name}", format_spread(spread(speeds), ",.0f"), ratio))
    return ResultTable(title, head, tuple(rows), (INTERVAL,))
