"""Measure runs at once, and the driver of a study: `make bench SUITE=executors`.

slots: tokens/s of one run on the whole machine, and of one run in each of two slots. driver: processor time and memory
of the driver on a simulated cluster.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from bench.processes import SHAPES, Process, ratio_table, take_turns
from bench.simulated_driver import simulate
from bench.suite import Suite, SuiteResult, SuiteSession
from bench.tables import ResultTable
from bench.workers import BenchWorker
from gpt2.system.errors import UserError
from kconfig import commands, rules
from study.executors.slots import SlotsError, local_slots

RUNS, SLOTS = 10_000, 500  # of the simulated cluster
PARTS = ("slots", "driver")


def measure_slots(session: SuiteSession, data: dict[str, Any]) -> ResultTable:
    """Measure one slot and two, in turns."""
    shape = SHAPES[session.resolved.device_class]
    arranged = {
        count: [
            Process(f"slot {n}", shape, tuple(slot.environment.items()), slot.cpus)
            for n, slot in enumerate(local_slots(count, session.resolved, 0))
        ]
        for count in (1, 2)
    }
    samples: dict[int, list[list[float]]] = {count: [] for count in arranged}
    data["slots"] = {"shape": dataclasses.asdict(shape), "tokens_per_second": samples}

    def record(number: int, count: int, speeds: list[float]) -> None:
        samples[count].append(speeds)
        each = " + ".join(f"{speed:,.0f}" for speed in speeds)
        session.say(f"round {number}/{session.rounds}  {count} at once: {each} tok/s")
        session.save(data)

    take_turns(session, arranged, record)
    totals = {count: [sum(each) for each in speeds] for count, speeds in samples.items()}
    title = f"{shape.name}, runs at once on one machine"
    return ratio_table(title, ("runs", "tok/s in all", "to 1"), totals)


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
