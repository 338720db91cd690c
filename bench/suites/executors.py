"""Measure runs at once, and the driver of a study: `make bench SUITE=executors`.

slots: tokens/s of one run on the whole machine, and of one run in each of two slots. Both arrangements keep their
processes and take turns, so that drift of the machine affects them alike. driver: processor time and memory of the
driver on a simulated cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.case_step import model_config, random_batch
from bench.cases import Sizes
from bench.runner import LIMIT_SECONDS
from bench.simulated_driver import simulate
from bench.suite import Suite, SuiteResult, SuiteSession
from bench.tables import INTERVAL, ResultTable, format_spread, spread
from bench.workers import BenchWorker
from gpt2.config.batch import BatchPlan, plan_batch
from gpt2.config.config import ANY_TARGET, OptimizerConfig
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.system.errors import UserError
from gpt2.train.step import Stepper
from kconfig import commands, rules
from study.executors.child_process import KEEP_HEAP, Slot
from study.executors.slots import SlotsError, local_slots

SHAPES = {
    "cpu": Sizes("6x384-t256", 6, 6, 384, 256),
    "card": Sizes("124m-t1024", 12, 12, 768, 1024),
}
SEQUENCES = {"cpu": (8, 2), "card": (256, 32)}  # of an update, of a micro-batch
OPTIMIZER = OptimizerConfig(6e-4, 0.1, 0.05, 0.1, 0.9, 0.95, 1e-8, 1.0)
WARM_UP_STEPS, ITERATIONS = 2, 10**9
RUNS, SLOTS = 10_000, 500  # of the simulated cluster
PARTS = ("slots", "driver")


Prepared = tuple[Stepper, Any, Any]
_PREPARED: list[Prepared] = []  # of this process


def prepared_slot(slot: Slot, kind: str) -> Prepared:
    """Restrict this process to the slot, build the model and run warm-up steps, once."""
    if not _PREPARED:
        os.environ.update(slot.environment)
        if slot.cpus:
            os.sched_setaffinity(0, slot.cpus)
        _PREPARED.append(prepare(kind))
    return _PREPARED[0]


def prepare(kind: str) -> Prepared:
    shape, (effective, micro) = SHAPES[kind], SEQUENCES[kind]
    resolved = attention_kernels.prepare_device(ANY_TARGET, model_config(shape))
    stepper = standard_stepper(shape, plan_batch(effective, micro, 1, shape.block_size), resolved)
    ids_ET = random_batch(shape, effective, resolved.device)
    with attention_kernels.attention_context(resolved):
        for iteration in range(WARM_UP_STEPS):
            stepper.step(ids_ET, iteration, ITERATIONS)
    return stepper, ids_ET, resolved


def standard_stepper(shape: Sizes, batch: BatchPlan, resolved: ResolvedTarget) -> Stepper:
    """Build the training step of standard attention, not compiled."""
    return Stepper(
        model_config(shape),
        OPTIMIZER,
        batch,
        seed=0,
        device=resolved.device,
        dtype=resolved.dtype,
        compile=False,
        parts=None,
    )


def time_slot(slot: Slot, kind: str, seconds: float) -> float:
    """Train for so many seconds in the slot; return the tokens per second. Each step ends with its loss read."""
    stepper, ids_ET, resolved = prepared_slot(slot, kind)
    began, steps = time.perf_counter(), 0
    with attention_kernels.attention_context(resolved):
        while time.perf_counter() - began < seconds:
            stepper.step(ids_ET, steps, ITERATIONS)
            steps += 1
    return steps * stepper.batch.tokens / (time.perf_counter() - began)


@contextlib.contextmanager
def arrangement(slots: Sequence[Slot], kind: str) -> Iterator[Any]:
    """Start a process in each slot; yield a function that trains in all at once and returns the speed of each."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(BenchWorker(f"slot {n}", KEEP_HEAP)) for n in range(len(slots))]
        pool = stack.enter_context(ThreadPoolExecutor(len(slots)))

        def measure(seconds: float) -> list[float]:
            limit = LIMIT_SECONDS + 10 * seconds
            calls = [
                pool.submit(worker.call, time_slot, slot, kind, seconds, limit_seconds=limit)
                for worker, slot in zip(workers, slots, strict=True)
            ]
            return [call.result() for call in calls]

        pairs = zip(workers, slots, strict=True)
        for preparing in [pool.submit(worker.call, warm_up, slot, kind) for worker, slot in pairs]:
            preparing.result()
        yield measure


def warm_up(slot: Slot, kind: str) -> None:
    prepared_slot(slot, kind)


def measure_slots(session: SuiteSession, data: dict[str, Any]) -> ResultTable:
    """Measure one slot and two, in turns."""
    kind = session.resolved.device_class
    arranged = {count: local_slots(count, session.resolved, 0) for count in (1, 2)}
    samples: dict[int, list[list[float]]] = {count: [] for count in arranged}
    data["slots"] = {"shape": dataclasses.asdict(SHAPES[kind]), "tokens_per_second": samples}
    with contextlib.ExitStack() as stack:
        turns = [(count, stack.enter_context(arrangement(slots, kind))) for count, slots in arranged.items()]
        for number in range(session.rounds):
            for count, measure in turns:
                samples[count].append(measure(session.seconds))
                each = " + ".join(f"{speed:,.0f}" for speed in samples[count][-1])
                session.say(f"round {number + 1}/{session.rounds}  {count} at once: {each} tok/s")
            session.save(data)
    alone = [speed for (speed,) in samples[1]]
    rows = []
    for count, speeds in samples.items():
        totals = [sum(each) for each in speeds]
        ratios = [total / one for total, one in zip(totals, alone, strict=True)]
        ratio = "-" if count == 1 else format_spread(spread(ratios))
        rows.append((f"{count}", format_spread(spread(totals), ",.0f"), ratio))
    title = f"{SHAPES[kind].name}, runs at once on one machine"
    return ResultTable(title, ("runs", "tok/s in all", "to 1"), tuple(rows), (INTERVAL,))


def measure_driver(session: SuiteSession, data: dict[str, Any]) -> ResultTable:
    """Drive a simulated cluster, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="driver-") as name, BenchWorker("driver") as worker:
        folder = Path(name)
        tree = rules.load_kconfig("cpu")
        commands.configure(tree, commands.read_layers("gpt2-ra-ablation-smoke+cpu"), [])
        (folder / "config").write_text(rules.render(tree))
        cost = worker.call(simulate, folder / "study", RUNS, SLOTS, folder / "config")
    data["driver"] = cost
    rows = (
        ("runs, slots, simulated hours", f"{cost['runs']:,}, {cost['slots']}, {cost['simulated_hours']:.1f}"),
        ("attempts, most at once", f"{cost['attempts']:,}, {cost['most_at_once']}"),
        ("finished once, twice", f"{cost['finished_once']:,}, {cost['finished_twice']}"),
        ("driver, processor s per 1,000 runs", f"{cost['seconds_per_1000_runs']:.2f}"),
        ("driver, share of a core", f"{cost['share_of_a_core']:.4%}"),
        ("driver, peak MiB", f"{cost['peak_bytes'] / 2**20:,.0f}"),
    )
    return ResultTable("simulated cluster; the driver is killed once, halfway", ("what", "value"), rows)


def run(session: SuiteSession) -> SuiteResult:
    """Measure both parts, or the one that SHAPE names."""
    if session.shape not in ("", *PARTS):
        raise UserError(f"unknown part SHAPE={session.shape}; parts: {', '.join(PARTS)}")
    data: dict[str, Any] = {}
    tables, notes = [], []
    if session.shape != "driver":
        try:
            tables.append(measure_slots(session, data))
        except SlotsError as error:
            notes.append(f"slots were not measured: {error}")
    if session.shape != "slots":
        tables.append(measure_driver(session, data))
    return SuiteResult(data, tuple(tables), tuple(notes))


SUITE = Suite(
    "executors",
    "tokens/s of 1 and 2 runs at once; cost of the driver on a simulated cluster",
    run,
    shape="slots or driver; both by default",
    rounds={"cpu": 6, "card": 6},
    seconds={"cpu": 10.0, "card": 10.0},
)
