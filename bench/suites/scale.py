"""Measure one run over several processes, and runs at once: `make bench SCALE=1`.

On a CPU the processes of an arrangement divide the cores; on cards each has one.
"""

from __future__ import annotations

import dataclasses

from bench.processes import SHAPES, Process, TrainedShape, ratio_table, take_turns
from bench.suite import Suite, SuiteResult, SuiteSession
from bench.suites import executors
from runtime.errors import UserError
from runtime.ranks import free_port
from runtime.torch_devices import list_in_child

BASELINE = "1 rank"


def arrangement(name: str, shape: TrainedShape, count: int) -> list[Process]:
    """Return the processes of a run of so many ranks."""
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": free_port()}
    found = []
    for number in range(count):
        variables = {"RANK": number, "LOCAL_RANK": number, **shared, "MASTER_ADDR": "127.0.0.1"}
        environment = tuple((key, str(value)) for key, value in variables.items())
        label = f"{name}, rank {number}"
        found.append(Process(label, shape, environment, ranks=count))
    return found


def arrangements(cards: int, shape: TrainedShape) -> dict[str, list[Process]]:
    """Return the arrangements of a machine with so many cards; 0: a CPU."""
    most = cards or 2
    counts = [count for count in (2, 4, 8) if count <= most]
    wanted = {BASELINE: 1, **{f"{count} ranks": count for count in counts}}
    return {name: arrangement(name, shape, count) for name, count in wanted.items()}


def run(session: SuiteSession) -> SuiteResult:
    """Measure every arrangement once a round."""
    cards = 0 if session.on_cpu else len([gpu for gpu in list_in_child().gpus if not gpu.integrated])
    if cards == 1:
        raise UserError("one card is not enough to measure several ranks; fix: use a machine with two")
    shape = SHAPES[session.resolved.device_class]
    arranged = arrangements(cards, shape)
    samples: dict[str, list[float]] = {name: [] for name in arranged}
    data = {"shape": dataclasses.asdict(shape), "cards": cards, "tokens_per_second": samples}

    def record(number: int, name: str, speeds: list[float]) -> None:
        samples[name].append(speeds[0])
        session.say(f"round {number}/{session.rounds}  {name}: {speeds[0]:,.0f} tok/s")
        session.save(data)

    take_turns(session, arranged, record)
    title = f"one run of {shape.name}, {shape.effective} sequences an update, micro-batch {shape.micro}"
    table = ratio_table(title, ("processes", "tok/s", f"to {BASELINE}"), samples)
    more = executors.run(session)
    return SuiteResult(data | dict(more.data), (table, *more.tables), more.notes)


SUITE = Suite(
    "scale",
    "tokens/s of one run over 1, 2 and more processes, and of runs at once",
    run,
    rounds={"cpu": 6, "card": 6},
    seconds={"cpu": 10.0, "card": 10.0},
)
