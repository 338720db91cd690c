"""Measure runs at once: `make bench SUITE=executors`.

Tokens/s of one run on the whole machine, and of one run in each of two slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.processes import SHAPES, Process, ratio_table, take_turns
from bench.suite import Suite, SuiteResult, SuiteSession
from study.executors.child_process import SlotsError, local_slots


def run(session: SuiteSession) -> SuiteResult:
    """Measure one slot and two, in turns."""
    shape = SHAPES[session.resolved.device_class]
    try:
        slots = {count: local_slots(count, session.resolved, 0) for count in (1, 2)}
    except SlotsError as error:
        return SuiteResult({}, (), (f"slots were not measured: {error}",))
    arranged = {
        count: [
            Process(f"slot {n}", shape, tuple(slot.environment.items()), slot.cpus)
            for n, slot in enumerate(each)
        ]
        for count, each in slots.items()
    }
    samples: dict[int, list[list[float]]] = {count: [] for count in arranged}
    data: dict[str, Any] = {"slots": {"shape": dataclasses.asdict(shape), "tokens_per_second": samples}}

    def record(number: int, count: int, speeds: list[float]) -> None:
        samples[count].append(speeds)
        each = " + ".join(f"{speed:,.0f}" for speed in speeds)
        session.say(f"round {number}/{session.rounds}  {count} at once: {each} tok/s")
        session.save(data)

    take_turns(session, arranged, record)
    totals = {count: [sum(each) for each in speeds] for count, speeds in samples.items()}
    title = f"{shape.name}, runs at once on one machine"
    return SuiteResult(data, (ratio_table(title, ("runs", "tok/s in all", "to 1"), totals),))


SUITE = Suite(
    "executors",
    "tokens/s of 1 and 2 runs at once",
    run,
    rounds={"cpu": 6, "card": 6},
    seconds={"cpu": 10.0, "card": 10.0},
)
