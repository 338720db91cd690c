"""Stress the links among devices: each pair alone, all ranks together, and groups that are compared with each other.

A deviating exchange of two ranks is evidence against this pair, and so are values that a rank received from another one
in an all-to-all. A rank is named where at least two of its pairs deviate, and at least half of them; else the link of
the pair is named, where the other pairs of its ends exchanged so often that the fault would have been found there
(section 2.3.2.3).
"""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from numerics.repeat.corruption import Corruption
from numerics.stress.exchanges import COLLECTIVES, COPY, EVERY_PAIR, REDUCE, SEND, Exchange, Exchanged
from numerics.stress.worker import DeviceLostError, DeviceWorker

CPU_SIZES, DEVICE_SIZES = (
    (240, 61440),
    (240, 983040, 15728640),
)  # elements; 240 is a multiple of 2, 3, 4, 5, 6, 8
CHANCE = 0.01  # of a rank whose other pairs show no deviation
MOST_GROUPED = 8  # ranks of which each pair has a group of its own
LEAST_SECONDS, MOST_SECONDS = 0.02, 2.0  # of a batch


@dataclass(frozen=True)
class LinkFault:
    """A deviating result. source: the sender, None for a sum. repetition: of this exchange, from 1."""

    exchange: Exchange
    receiver: int
    source: int | None
    repetition: int
    seconds: float
    shape: Corruption | None

    @property
    def pair(self) -> tuple[int, int] | None:
        """Return the two ranks that the values passed between; None for an exchange of more."""
        ranks = self.exchange.ranks
        if self.exchange.kind == EVERY_PAIR and self.source is not None:
            ranks = self.source, self.receiver
        return (min(ranks), max(ranks)) if len(ranks) == 2 else None


@dataclass
class Links:
    """The result. names: of the ranks. counts: exchange -> repetitions on each member. error: that ended the stress.

    faulty: ranks that deviate in computations of their own; they explain the exchanges of their pairs.
    """

    names: list[str]
    counts: dict[Exchange, int] = field(default_factory=dict)
    faults: list[LinkFault] = field(default_factory=list)
    error: str = ""
    faulty: set[int] = field(default_factory=set)

    def odd(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ranks and the pairs that explain the deviating exchanges of two ranks."""
        pairs = {fault.pair for fault in self.faults} - {None}
        others = len(self.names) - 1
        ranks = [rank for rank in self.faulty if any(pair and rank in pair for pair in pairs)]
        pairs = {pair for pair in pairs if pair and not self.faulty & {*pair}}
        while pairs:
            counts = Counter(rank for pair in pairs if pair for rank in pair)
            rank, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
            if count < 2 or 2 * count < others:
                break
            ranks.append(rank)
            pairs = {pair for pair in pairs if pair and rank not in pair}
        return sorted(ranks), sorted(pair for pair in pairs if pair)

    def separated(self, pair: tuple[int, int]) -> bool:
        """Whether the other pairs of both ends exchanged so often that a faulty end would have been found there."""
        wrong = {(fault.exchange, fault.repetition) for fault in self.faults if fault.pair == pair}
        rate = min(len(wrong) / max(self._exchanged(pair), 1), 1.0)
        every = itertools.combinations(range(len(self.names)), 2)
        near = [other for other in every if other != pair and {*other} & {*pair}]
        others = [[other for other in near if end in other] for end in pair]
        return all((1 - rate) ** sum(map(self._exchanged, other)) < CHANCE for other in others)

    def _exchanged(self, pair: tuple[int, int]) -> int:
        """Return the exchanges of a pair, with those of all-to-all."""
        return sum(
            count for exchange, count in self.counts.items()
            if {*exchange.ranks} == {*pair} or (exchange.kind == EVERY_PAIR and {*pair} <= {*exchange.ranks})
        )  # fmt: skip

    def directions(self, pair: tuple[int, int]) -> list[tuple[int, int]]:
        """Return (sender, receiver) of the deviating transfers between two ranks."""
        found = {
            (fault.source, fault.receiver)
            for fault in self.faults
            if fault.pair == pair and fault.source is not None
        }
        return sorted((source, receiver) for source, receiver in found if source is not None)

    def sources(self) -> list[int]:
        """Return the ranks whose values arrived wrong in exchanges of more than two ranks."""
        return sorted(
            {fault.source for fault in self.faults if fault.pair is None and fault.source is not None}
        )


class LinkStress:
    """Exchanges among workers. Every member is asked at the same time."""

    def __init__(
        self, workers: Sequence[DeviceWorker], devices: Sequence[str], most_repetitions: int = 10_000
    ) -> None:
        self.workers, self.devices = list(workers), list(devices)
        self.links = Links([worker.name for worker in workers])
        self.most_repetitions = most_repetitions
        self._world = tuple(range(len(workers)))
        planned = exchanges(devices)
        self.round_length, self._schedule = len(planned), itertools.cycle(planned)
        self._per_repetition: dict[Exchange, float] = {}

    @property
    def usable(self) -> bool:
        return len(self.workers) > 1 and not self.links.error

    def connect(self, port: int | None = None) -> None:
        """Join the workers. Where that fails, the links say why and are not stressed."""
        groups = [self._world, *pairs(len(self.workers))]
        arguments = len(self.workers), port or free_port(), groups
        self._ask(self._world, "connect", lambda rank: (rank, *arguments))

    def batch(self, seconds: float, lost: Callable[[DeviceWorker, str], None], epoch: float) -> str:
        """Run the next exchange for about `seconds`. epoch: when the stress began. Returns its name."""
        exchange = next(self._schedule)
        per = self._per_repetition.get(exchange, LEAST_SECONDS)
        target = min(max(seconds, LEAST_SECONDS), MOST_SECONDS)
        repetitions = min(max(int(target / max(per, 1e-6)), 1), self.most_repetitions)
        asked = exchange.ranks[:1] if exchange.kind == COPY else exchange.ranks
        answers = self._ask(
            asked, "exchange", lambda rank: (exchange, self._world, repetitions, self.devices), lost
        )
        before = self.links.counts.get(exchange, 0)
        self.links.counts[exchange] = before + repetitions
        for rank, found in answers.items():
            self._per_repetition[exchange] = max(found.seconds / repetitions, 1e-6)
            receiver = exchange.ranks[1] if exchange.kind in (COPY, SEND) else rank
            for wrong in found.wrong:
                number = before + wrong.repetition + 1
                fault = LinkFault(exchange, receiver, wrong.source, number, wrong.at - epoch, wrong.shape)
                self.links.faults.append(fault)
            if found.error:
                self.links.error = f"{exchange.title} on {self.links.names[rank]}: {found.error}"
        return exchange.title

    def _ask(
        self,
        ranks: Sequence[int],
        method: str,
        arguments: Callable[[int], tuple[object, ...]],
        lost: Callable[[DeviceWorker, str], None] = lambda worker, reason: None,
    ) -> dict[int, Exchanged]:
        """Ask several workers at the same time. One without an answer ends the stress of the links."""
        found: dict[int, Exchanged] = {}
        asked: list[int] = []
        for rank in ranks:
            try:
                self.workers[rank].request(method, *arguments(rank))
                asked.append(rank)
            except DeviceLostError as error:
                self.links.error = f"{method}: {error}"
                lost(self.workers[rank], self.links.error)
        for rank in asked:
            try:
                found[rank] = self.workers[rank].answer()
            except DeviceLostError as error:
                self.links.error = self.links.error or f"{method}: {error}"
                lost(self.workers[rank], f"{method}: {error}")
        return found


def pairs(world: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks that have a group of their own."""
    return list(itertools.combinations(range(world), 2)) if 2 < world <= MOST_GROUPED else []


def exchanges(devices: Sequence[str]) -> list[Exchange]:
    """Return one round: each pair alone, then all ranks together."""
    world = tuple(range(len(devices)))
    kinds = {torch.device(device).type for device in devices}
    sizes = CPU_SIZES if kinds == {"cpu"} else DEVICE_SIZES
    found: list[Exchange] = []
    for size in sizes:
        for sender, receiver in itertools.permutations(world, 2):
            found.append(Exchange(SEND, (sender, receiver), size))
            if devices[sender] != devices[receiver]:
                found.append(Exchange(COPY, (sender, receiver), size))
        found += [Exchange(REDUCE, pair, size) for pair in pairs(len(world))]
        found += [Exchange(kind, world, size) for kind in COLLECTIVES]
    return found


def free_port() -> int:
    """Return a port of this machine that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
