"""Exchanges among devices with a known result: collectives, transfers between two ranks, copies between two devices.

Moved values are drawn over all 64 bits. Summed values are integers whose sum float32 represents exactly, so that each
order of the sum has the same bits. Each member compares its result with the known one.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from numerics.repeat.corruption import Corruption, analyse

REDUCE, GATHER, SCATTER, BROADCAST, EVERY_PAIR, SEND, COPY = (
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "send", "device copy",
)  # fmt: skip
COLLECTIVES = (REDUCE, GATHER, SCATTER, BROADCAST, EVERY_PAIR)
EXACT = 1 << 24  # integers below it are exact in float32
MOST_SHAPES = 4  # deviations of a batch that are analysed
PATIENCE_SECONDS = 120.0  # for another rank


@dataclass(frozen=True)
class Exchange:
    """kind: one of those above. ranks: the members, of SEND and COPY the sender first. size: elements of a member."""

    kind: str
    ranks: tuple[int, ...]
    size: int

    @property
    def title(self) -> str:
        return f"{self.kind} {self.size}"


@dataclass(frozen=True)
class Wrong:
    """A result that is not the known one. source: the rank whose values it should have; None for a sum.

    repetition: within the batch, from 0. at: seconds since the epoch. shape: of the first ones of a batch.
    """

    repetition: int
    at: float
    source: int | None
    shape: Corruption | None


@dataclass(frozen=True)
class Exchanged:
    """Repetitions of an exchange on one member. error: of a library; then nothing is exchanged any more."""

    repetitions: int
    seconds: float
    wrong: list[Wrong] = field(default_factory=list)
    error: str = ""


Connect = Callable[[Sequence[int]], Any]  # members -> their process group


class Exchanges:
    """The exchanges of one rank. connect: called on every rank with the same members in the same order.

    disturb: changes what this rank gives away, of a device with a simulated fault.
    """

    def __init__(
        self,
        rank: int,
        device: str,
        connect: Connect,
        disturb: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        self.rank, self.device, self._connect, self._disturb = rank, device, connect, disturb
        self._groups: dict[tuple[int, ...], Any] = {}
        self._known: dict[tuple[Exchange, int | None], Tensor] = {}

    def join(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the process groups. Every rank calls it with the same groups."""
        for members in groups:
            group = self._connect(tuple(members))
            if self.rank in members:
                self._groups[tuple(members)] = group

    def batch(
        self, exchange: Exchange, world: tuple[int, ...], repetitions: int, devices: Sequence[str]
    ) -> Exchanged:
        """Repeat an exchange. world: the members of the group that SEND uses. devices: of every rank, for COPY."""
        began, wrong = time.monotonic(), list[Wrong]()
        try:
            for number in range(repetitions):
                for source, result, known in self._exchange(exchange, world, devices):
                    if not torch.equal(result, known):
                        shape = analyse(known.cpu(), result.cpu()) if len(wrong) < MOST_SHAPES else None
                        wrong.append(Wrong(number, time.time(), source, shape))
        except RuntimeError as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return Exchanged(
                len({each.repetition for each in wrong}), time.monotonic() - began, wrong, first[:200]
            )
        return Exchanged(repetitions, time.monotonic() - began, wrong)

    # -- one exchange

    def _exchange(
        self, exchange: Exchange, world: tuple[int, ...], devices: Sequence[str]
    ) -> list[tuple[int | None, Tensor, Tensor]]:
        """Return (source, result, known result) for each part that this rank received."""
        members, kind = exchange.ranks, exchange.kind
        if kind == SEND:
            return self._send(exchange, self._groups[world])
        if kind == COPY:
            sent = self.outgoing(exchange, self._values(exchange, members[0]))
            target = devices[members[1]]
            result = torch.empty_like(sent, device=target).copy_(sent)
            return [
                (members[0], self.incoming(exchange, result), self._values(exchange, members[0]).to(target))
            ]
        group, mine = self._groups[members], self.outgoing(exchange, self._values(exchange, self.rank))
        if kind == REDUCE:
            total = mine.clone()
            group.allreduce([total]).wait()
            return [(None, self.incoming(exchange, total), self._sum(exchange))]
        if kind == SCATTER:
            part = torch.empty(exchange.size // len(members), device=self.device)
            parts = list(mine[: part.numel() * len(members)].chunk(len(members)))
            group.reduce_scatter([part], [parts]).wait()
            begin = members.index(self.rank) * part.numel()
            return [(None, self.incoming(exchange, part), self._sum(exchange)[begin : begin + part.numel()])]
        if kind == BROADCAST:
            found = []
            for place, root in enumerate(members):
                value = mine.clone() if root == self.rank else torch.empty_like(mine)
                options = torch.distributed.BroadcastOptions()
                options.rootRank, options.rootTensor = place, 0
                group.broadcast([value], options).wait()
                found.append((root, value))
        elif kind == GATHER:
            gathered = [torch.empty_like(mine) for _ in members]
            group.allgather([gathered], [mine]).wait()
            found = list(zip(members, gathered, strict=True))
        else:  # every rank sends to every other one at once
            received = torch.empty(len(members) * exchange.size, dtype=torch.int64, device=self.device)
            group.alltoall_base(received, mine.repeat(len(members)), [], []).wait()
            found = list(zip(members, received.chunk(len(members)), strict=True))
        return [
            (source, self.incoming(exchange, value), self._values(exchange, source))
            for source, value in found
            if source != self.rank
        ]

    def _send(self, exchange: Exchange, group: Any) -> list[tuple[int | None, Tensor, Tensor]]:
        sender, receiver = exchange.ranks
        known = self._values(exchange, sender)
        if self.rank == sender:
            group.send([self.outgoing(exchange, known)], receiver, 0).wait()
            return []
        result = torch.empty_like(known)
        group.recv([result], sender, 0).wait()
        return [(sender, self.incoming(exchange, result), known)]

    def outgoing(self, exchange: Exchange, value: Tensor) -> Tensor:
        """Return the values that this rank gives away."""
        return self._disturb(value)

    def incoming(self, exchange: Exchange, value: Tensor) -> Tensor:
        """Return the values that this rank received."""
        return value

    # -- known values

    def _values(self, exchange: Exchange, source: int) -> Tensor:
        """Return the values of a rank: integers, in float32 where they are summed."""
        key = exchange, source
        if key not in self._known:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{exchange.title} of {source}".encode()))
            if exchange.kind in (REDUCE, SCATTER):
                most = EXACT // len(exchange.ranks)
                value = torch.randint(-most + 1, most, (exchange.size,), generator=generator).float()
            else:
                value = torch.randint(-(2**62), 2**62, (exchange.size,), generator=generator)
            self._known[key] = value.to(self.device)
        return self._known[key]

    def _sum(self, exchange: Exchange) -> Tensor:
        key = exchange, None
        if key not in self._known:
            parts = [self._values(exchange, rank).cpu().to(torch.int64) for rank in exchange.ranks]
            self._known[key] = torch.stack(parts).sum(0).float().to(self.device)
        return self._known[key]


def connect_processes(rank: int, world: int, port: int, device: str) -> Connect:
    """Join the processes of this machine. Returns the function that makes a group of them."""
    kind = torch.device(device).type
    backend = torch.distributed.get_default_backend_for_device(kind)
    torch.distributed.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )

    def connect(members: Sequence[int]) -> Any:
        if len(members) == world:
            return torch.distributed.group.WORLD
        return torch.distributed.new_group(list(members))

    return connect
