"""Profile a training step by operation, in our step and in the plain one: `make bench SUITE=profile`."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

from bench.case_step import kernels, prepare_case
from bench.cases import SHAPES, Shape, find_shapes
from bench.runner import LIMIT_SECONDS, case_worker
from bench.suite import ResultTable, Suite, SuiteResult, SuiteSession
from bench.workers import BenchError
from gpt2.clocks import device_synchroniser
from runtime.errors import UserError

CASES = ("plain", "B", "RALEARN")
SHOWN = 20  # operations in the table
STEP_LIMIT_SECONDS = 60.0  # for each profiled step


def run(session: SuiteSession) -> SuiteResult:
    """Profile each case in a new worker. Save after every case."""
    shape = find_shapes(SHAPES[session.resolved.device_class], session.shape)[0]
    micro = dict(shape.cases)[
        "RALEARN"
    ]  # the variants' micro-batch; B and the plain case have others as well
    session.say(f"{shape.name}, an optimizer step of {micro} x {shape.accumulation(micro)} sequences")
    found: dict[str, dict[str, Any]] = {}
    data = {"shape": shape.name, "micro": micro, "accumulation": shape.accumulation(micro), "cases": found}
    limit = LIMIT_SECONDS + STEP_LIMIT_SECONDS * session.rounds
    for case in CASES:
        try:
            with case_worker(shape, case, micro) as worker:
                found[case] = worker.call(
                    profile_case, shape, case, micro, session.rounds, limit_seconds=limit
                )
        except BenchError as error:
            session.say(f"skipped: {error}")
            continue
        session.save(data)
    if not found:
        raise UserError("no case could be profiled; the reason for each case is printed above")
    return SuiteResult(data, (table(shape, found),))


def profile_case(shape: Shape, case: str, micro: int, steps: int) -> dict[str, Any]:
    """Measure seconds and page faults of a step without the profiler, then profile its operations. Call in a worker."""
    prepared = prepare_case(shape, case, micro)
    device = prepared.resolved.device
    gpu = device != "cpu"

    def run_steps() -> None:
        for _ in range(steps):
            prepared.step(1)
        device_synchroniser(device)()

    with kernels(case, prepared.resolved):
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        run_steps()
        seconds = (time.perf_counter() - began) / steps
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // steps
        on_device = ProfilerActivity.CUDA if device.startswith("cuda") else ProfilerActivity.PrivateUse1
        kinds = [ProfilerActivity.CPU, *([on_device] if gpu else [])]
        with torch.profiler.profile(activities=kinds) as profiler:
            run_steps()
    found = operations(profiler.key_averages(), gpu, steps)
    return {"step_seconds": seconds, "page_faults": faults, "operations": found}


def operations(averages: Iterable[Any], gpu: bool, steps: int) -> list[dict[str, Any]]:
    """Select the rows of torch.profiler's averages whose own times add up to the time of the steps, longest first.

    On a CPU: the CPU's rows. On a GPU: kernels, copies and fills on the GPU. The CPU row of an operation repeats the
    time of its kernels, and an annotation repeats that of all kernels under it; torch's own total excludes both.
    """
    field = "self_device_time_total" if gpu else "self_cpu_time_total"
    rows = [
        {"name": event.key, "seconds": getattr(event, field) / 1e6 / steps, "calls": event.count / steps}
        for event in averages
        if not gpu or (event.device_type != DeviceType.CPU and not event.is_user_annotation)
    ]
    return sorted((row for row in rows if row["seconds"] > 0), key=lambda row: -row["seconds"])


def table(shape: Shape, found: dict[str, dict[str, Any]]) -> ResultTable:
    """List the operations with the largest share in any case: milliseconds a step and share of all operations."""
    by_name = {case: {row["name"]: row for row in value["operations"]} for case, value in found.items()}
    total = {case: sum(row["seconds"] for row in rows.values()) for case, rows in by_name.items()}
    largest: dict[str, float] = {}  # share of an operation
    for case, rows in by_name.items():
        for name, row in rows.items():
            largest[name] = max(largest.get(name, 0.0), row["seconds"] / total[case])

    def cell(case: str, name: str) -> str:
        row = by_name[case].get(name)
        return f"{1000 * row['seconds']:,.0f} ({row['seconds'] / total[case]:.1%})" if row else "-"

    names = sorted(largest, key=lambda name: -largest[name])[:SHOWN]
    cells = [(name[:60], *(cell(case, name) for case in found)) for name in names]
    cells += [("all operations", *(f"{1000 * total[case]:,.0f}" for case in found))]
    cells += [("a step, not profiled", *(f"{1000 * value['step_seconds']:,.0f}" for value in found.values()))]
    cells += [("page faults a step", *(f"{value['page_faults']:,}" for value in found.values()))]
    return ResultTable(f"operations of a step, {shape.name}", ("ms a step (share)", *found), tuple(cells))


SUITE = Suite(
    "profile",
    "time of a step by operation, in our step and in the plain one",
    run,
    shape="the first shape whose name contains this, such as 6x384",
    rounds={"cpu": 3, "card": 3},
)
