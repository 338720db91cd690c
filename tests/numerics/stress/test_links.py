"""A flipping rank and a flipping link among gloo ranks are named; sound ranks are not. Ranks are threads here."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from numerics.record.tensor_digest import bits_of
from numerics.stress.exchanges import BROADCAST, COLLECTIVES, COPY, GATHER, REDUCE, SEND, Exchange, Exchanges
from numerics.stress.kernels import COMPUTING, MEMORY
from numerics.stress.link_report import link_sentences
from numerics.stress.links import LinkFault, Links, LinkStress, exchanges, pairs
from numerics.stress.report import as_json, stress_document
from numerics.stress.run import LINKS, Stress, StressOutcome
from numerics.stress.station import Flip, Station
from numerics.stress.worker import DeviceLostError, ThreadWorker
from pages.document import render_terminal

ROOT = Path(__file__).parents[3]
KERNELS = ["matrix product 64 float32", "memory: walking ones"]


class Rounds:
    """Ends a stress after a number of questions, so that no test depends on the clock."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


class FlippingLink(Exchanges):
    """What arrives at rank 0 from rank 2 has a flipped bit."""

    def incoming(self, exchange: Exchange, value: Tensor) -> Tensor:
        direct = exchange.kind == SEND and exchange.ranks == (2, 0)
        if not direct and not (exchange.kind == REDUCE and exchange.ranks == (0, 2) and self.rank == 0):
            return value
        value = value.clone()
        bits_of(value)[7] ^= 1 << 20
        return value


@contextmanager
def ranks(
    world: int, faults: dict[int, Flip] | None = None, kind: type[Exchanges] = Exchanges, seconds: float = 60
) -> Iterator[list[ThreadWorker]]:
    """Workers that are connected by gloo."""
    store = torch.distributed.HashStore()

    def connect(rank: int) -> Callable[[Sequence[int]], Any]:
        def group(members: Sequence[int]) -> Any:
            if rank not in members:
                return None
            part = torch.distributed.PrefixStore(str(members), store)
            place = list(members).index(rank)
            return torch.distributed.ProcessGroupGloo(part, place, len(members), timedelta(seconds=seconds))

        return group

    def station(rank: int) -> Station:
        made = Station("cpu", 1 << 12, (faults or {}).get(rank))
        made.exchanges = kind(rank, "cpu", connect(rank), made._disturbed)
        made.exchanges.join([tuple(range(world)), *pairs(world)])
        return made

    with ThreadPoolExecutor(world) as pool:
        stations = list(pool.map(station, range(world)))
    workers = [ThreadWorker(f"rank {rank}", station) for rank, station in enumerate(stations)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def stressed(workers: Sequence[ThreadWorker], turns: int, names: Sequence[str] = KERNELS) -> StressOutcome:
    links = LinkStress(workers, ["cpu"] * len(workers), 4)
    stress = Stress(workers, names, 3600.0, None, Rounds(len(names) + turns), 2, links)
    return stress.run()


def only_links(workers: Sequence[ThreadWorker], rounds: int = 1) -> Links:
    """Run each planned exchange `rounds` times."""
    stress = LinkStress(workers, ["cpu"] * len(workers), 4)
    for _ in range(rounds * stress.round_length):
        stress.batch(0.02, lambda worker, reason: None, 0.0)
    return stress.links


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sound_ranks_have_every_known_result(world: int) -> None:
    with ranks(world) as workers:
        links = only_links(workers)
    assert (links.faults, links.error) == ([], "")
    assert {exchange.kind for exchange in links.counts} == {SEND, *COLLECTIVES}
    sends = {exchange.ranks for exchange in links.counts if exchange.kind == SEND}
    assert sends == set(itertools.permutations(range(world), 2))
    assert link_sentences(links) == []


@pytest.mark.parametrize("world", [3, 4])
def test_a_rank_that_flips_bits_of_what_it_sends_is_named(world: int) -> None:
    with ranks(world, {1: Flip(1.0, 22)}) as workers:
        links = only_links(workers, rounds=2)
    assert links.odd() == ([1], [])
    assert link_sentences(links) == [f"rank 1: exchanges with {world - 1} of {world - 1} other ranks deviate"]
    moved = [fault for fault in links.faults if fault.source is not None]
    assert {fault.source for fault in moved} == {1}
    assert {fault.shape.bits for fault in moved if fault.shape} == {(22,)}
    assert {fault.exchange.kind for fault in links.faults} >= {SEND, REDUCE, GATHER, BROADCAST}


@pytest.mark.parametrize("world", [3, 4])
def test_a_link_that_flips_bits_is_named_with_its_direction(world: int) -> None:
    with ranks(world, kind=FlippingLink) as workers:
        links = only_links(workers, rounds=2)
    assert links.odd() == ([], [(0, 2)])
    assert links.directions((0, 2)) == [(2, 0)]
    assert link_sentences(links) == ["link of rank 0 and rank 2: its exchanges deviate, rank 2 to rank 0"]


def test_two_ranks_alone_do_not_separate_the_link_from_its_ends() -> None:
    with ranks(2, {1: Flip(1.0, 3)}) as workers:
        links = only_links(workers)
    assert links.odd() == ([], [(0, 1)])


def test_a_link_is_named_only_where_the_other_pairs_would_have_shown_a_faulty_rank() -> None:
    pair = Exchange(SEND, (0, 1), 8)
    others = [Exchange(SEND, ranks, 8) for ranks in ((0, 2), (1, 2))]
    links = Links(["a", "b", "c"], {pair: 100, others[0]: 100, others[1]: 100}, [fault(0, 1)])
    assert not links.separated((0, 1))  # 0.99^100 is 0.37
    assert link_sentences(links)[0].startswith("link of a and b, or one of the two: ")
    links.counts |= dict.fromkeys(others, 500)  # 0.99^500 is 0.0066
    assert links.separated((0, 1))
    links.counts[others[1]] = 100
    assert not links.separated((0, 1))
    links.faulty = {1}
    assert links.odd() == ([1], [])
    assert link_sentences(links) == ["b: exchanges with 1 of 2 other ranks deviate, and its computations"]


def test_the_report_has_the_faulty_rank_its_links_and_the_time_of_each_kind() -> None:
    with ranks(3, {2: Flip(1.0, 20)}) as workers:
        outcome = stressed(workers, 120)
    assert outcome.faulty == ["rank 2"]
    assert outcome.links
    assert outcome.links.odd() == ([2], [])
    assert list(outcome.spent) == [COMPUTING, MEMORY, LINKS]
    text = " ".join(render_terminal(stress_document(outcome)).split())
    assert "1 of 3 devices deviate: rank 2" in text
    assert "rank 2: exchanges with 2 of 2 other ranks deviate" in text
    assert "first deviation: " in text.partition("Links")[2]
    content = json.loads(json.dumps(as_json(outcome, "x")))
    assert content["links"]["odd_ranks"] == ["rank 2"]
    assert content["seconds_by_kind"].keys() == outcome.spent.keys()
    with ranks(3, kind=FlippingLink) as workers:
        outcome = stressed(workers, 250)
    assert outcome.faulty == []
    text = " ".join(render_terminal(stress_document(outcome)).split())
    assert "1 link deviates; see Links." in text
    assert as_json(outcome, "x")["links"]["odd_links"] == [
        {"ranks": ["rank 0", "rank 2"], "directions": [["rank 2", "rank 0"]]}
    ]


def test_a_lost_rank_ends_the_exchanges_and_the_others_compute_on() -> None:
    class Dying(ThreadWorker):
        def request(self, method: str, *arguments: object) -> None:
            if method == "exchange":
                raise DeviceLostError(f"{self.name} ended with exit status -9")
            super().request(method, *arguments)

    with ranks(3, seconds=1) as workers:
        dying = Dying("rank 0", workers[0].station)
        outcome = stressed([dying, *workers[1:]], 40)
        dying.close()
    assert outcome.lost["rank 0"] == "exchange: rank 0 ended with exit status -9"
    assert outcome.links
    assert outcome.links.error
    assert outcome.repetitions("rank 1") > outcome.repetitions("rank 0")


def test_a_copy_between_devices_is_compared() -> None:
    class Wrong(Exchanges):
        def incoming(self, exchange: Exchange, value: Tensor) -> Tensor:
            return value + 1

    exchange = Exchange(COPY, (0, 1), 64)
    for kind, wrong in ((Exchanges, 0), (Wrong, 3)):
        found = kind(0, "cpu", lambda members: None).batch(exchange, (0, 1), 3, ["cpu", "cpu"])
        assert (len(found.wrong), found.error) == (wrong, "")
    planned = exchanges(["meta:0", "meta:1"])
    assert {each.ranks for each in planned if each.kind == COPY} == {(0, 1), (1, 0)}


@given(st.integers(2, 9), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_known_sum_is_that_of_every_order(world: int, size: int, order: random.Random) -> None:
    made = Exchanges(0, "cpu", lambda members: None)
    exchange = Exchange(REDUCE, tuple(range(world)), size)
    parts = [made._values(exchange, rank) for rank in range(world)]
    order.shuffle(parts)
    total = torch.zeros(size)
    for part in parts:
        total = total + part
    assert torch.equal(total, made._sum(exchange))


def fault(one: int, other: int) -> LinkFault:
    return LinkFault(Exchange(SEND, (one, other), 8), other, one, 1, 0.0, None)


@given(st.integers(3, 9), st.data())
def test_the_smallest_explanation_is_a_rank_or_links(world: int, data: Any) -> None:
    rank = data.draw(st.integers(0, world - 1))
    others = [other for other in range(world) if other != rank]
    least = max(2, -(-(world - 1) // 2))
    hit = data.draw(st.sets(st.sampled_from(others), min_size=least))
    names = [str(number) for number in range(world)]
    assert Links(names, faults=[fault(rank, other) for other in hit]).odd()[0] == (
        [rank] if len(hit) > 1 else []
    )
    lone = [(a, b) for a, b in zip(range(0, world - 1, 2), range(1, world, 2), strict=False)]
    assert Links(names, faults=[fault(*pair) for pair in lone]).odd() == ([], lone)


def test_the_processes_of_the_command_exchange_and_a_fault_ends_with_status_1(tmp_path: Path) -> None:
    process = subprocess.run(
        [
            sys.executable, "-m", "numerics", "stress", "--minutes", "0.01", "--devices", "cpu", "cpu",
            "--simulate", "1:1.0:21", "--memory", "1", "-o", str(tmp_path),
        ],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    (file,) = tmp_path.glob("stress-*.json")
    links = json.loads(file.read_text())["links"]
    assert links["error"] is None
    assert links["odd_ranks"] == ["cpu process 1"]
    assert links["conclusion"] == [
        "cpu process 1: exchanges with 1 of 1 other ranks deviate, and its computations"
    ]
