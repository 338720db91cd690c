"""Stress devices: elect golden digests, then repeat every kernel on each device alone and on all together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from numerics.errors import NumericsError
from numerics.repeat.corruption import Corruption, analyse
from numerics.stress.kernels import kind_of
from numerics.stress.links import Links, LinkStress
from numerics.stress.station import Deviation, KernelRepetitions
from numerics.stress.vote import elect
from numerics.stress.worker import DeviceLostError, DeviceWorker

ELECTION = 5  # repetitions before the golden digests are known
START, ALONE, TOGETHER = "start", "alone", "together"
LINKS = "links"  # a kind of work beside those of kernels
LEAST_SECONDS, MOST_SECONDS = 0.02, 2.0  # of a batch
MOST_REPETITIONS = 10_000  # of a batch
MOST_SHAPES = 20  # deviations of a device whose values are analysed
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class DeviatingResult:
    """A deviating result. repetition: of the kernel on this device, from 1. seconds: since the start of the stress."""

    device: str
    kernel: str
    mode: str
    repetition: int
    seconds: float
    shape: Corruption | None = None

    def __str__(self) -> str:
        text = f"{self.kernel}, {self.mode}, repetition {self.repetition}, after {self.seconds:.1f} s"
        if self.shape is None:
            return f"{text}: the values were not kept"
        if not self.shape.count:
            return f"{text}: the values are golden, the device computed another hash of them"
        return f"{text}: {self.shape}"


@dataclass
class StressOutcome:
    """The result of a stress.

    faults: the deviating results of each device in order of time; devices without one have an empty list. counts:
    (device, kernel, mode) -> repetitions. golden: kind -> kernel -> digest. odd: (kernel, device) that gave another
    result in most repetitions. unresolved: kernels without a majority. lost: devices that ended or hung. spent: seconds
    by kind of work, after the election. links: exchanges among the devices, None for one device.
    """

    kinds: Mapping[str, str]
    faults: dict[str, list[DeviatingResult]] = field(default_factory=dict)
    counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    golden: dict[str, dict[str, int]] = field(default_factory=dict)
    odd: list[tuple[str, str]] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    links: Links | None = None
    spent: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    planned_seconds: float = 0.0
    stopped: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def faulty(self) -> list[str]:
        """Return the devices with a deviation, a constant other result, deviating links, or no answer."""
        odd = {device for _, device in self.odd}
        odd |= {self.links.names[rank] for rank in self.links.odd()[0]} if self.links else set()
        return [name for name in self.kinds if self.faults.get(name) or name in odd or name in self.lost]

    def repetitions(self, device: str) -> int:
        return sum(count for (name, _, _), count in self.counts.items() if name == device)


class Stress:
    """workers: the devices. progress: receives the finished share and a text. stop: whether to end now."""

    def __init__(
        self,
        workers: Sequence[DeviceWorker],
        kernels: Sequence[str],
        seconds: float,
        progress: Progress | None = None,
        stop: Callable[[], bool] | None = None,
        most_repetitions: int = MOST_REPETITIONS,
        links: LinkStress | None = None,
    ) -> None:
        """most_repetitions: of a batch. links: of connected workers."""
        if not workers:
            raise NumericsError("there is no device; fix: name one, such as --devices cpu")
        self.workers, self.kernels, self.limit = list(workers), list(kernels), seconds
        self.progress = progress or (lambda share, text: None)
        self.stop = stop or (lambda: False)
        self.most_repetitions, self.links = most_repetitions, links
        self.outcome = StressOutcome(
            {worker.name: worker.kind for worker in workers}, planned_seconds=seconds
        )
        self.outcome.faults = {worker.name: [] for worker in workers}
        self.outcome.links = links.links if links else None
        self._began, self._epoch = time.monotonic(), time.time()
        self._per_repetition: dict[str, float] = {}
        self._outputs: dict[tuple[str, str], Tensor | None] = {}

    def run(self) -> StressOutcome:
        """Run until the time has passed or `stop` says so. Every kernel is run at least once to elect its digest."""
        if not self.outcome.golden:
            self.elect()
        by_kind: dict[str, list[str]] = {}
        for name in self.kernels:
            by_kind.setdefault(kind_of(name), []).append(name)
        spent = self.outcome.spent = dict.fromkeys([*by_kind, *([LINKS] if self.links else [])], 0.0)
        done = dict.fromkeys(by_kind, 0)
        for _ in range(self.links.round_length if self.links else 0):  # each exchange at least once
            if LINKS in spent and not self.stop():
                self._exchange(len(spent), 0.0)
        while not self._ended() and self.workers:
            kind = min(spent, key=spent.__getitem__)
            began = time.monotonic()
            if kind == LINKS:
                self._exchange(len(spent), self.limit)
            else:
                self._kernel(by_kind[kind][done[kind] % len(by_kind[kind])])
                done[kind] += 1
            if kind in spent:
                spent[kind] += time.monotonic() - began
        self._explain_links()
        self.outcome.seconds = time.monotonic() - self._began
        self.outcome.stopped = self.stop()
        return self.outcome

    def _explain_links(self) -> None:
        links, outcome = self.outcome.links, self.outcome
        if links:
            odd = {device for _, device in outcome.odd}
            links.faulty = {
                rank for rank, name in enumerate(links.names) if outcome.faults[name] or name in odd
            }

    # -- election

    def elect(self) -> None:
        """Run every kernel on all devices and take the results of the majority as golden."""
        votes: dict[str, dict[str, list[int]]] = {}  # kernel -> device -> digests
        kept: dict[tuple[str, str], dict[int, Tensor | None]] = {}
        for number, name in enumerate(self.kernels):
            if self.stop():
                break
            self.progress(0.0, f"golden results: {name} ({number + 1} of {len(self.kernels)})")
            for worker, batch in self._together(self.workers, name, ELECTION):
                votes.setdefault(name, {})[worker.name] = list(batch.digests)
                self._per_repetition[name] = max(
                    self._per_repetition.get(name, 0.0), batch.seconds / ELECTION
                )
                self._count(worker, name, START, batch)
                known = {each.digest: each.output for each in batch.deviations}  # of exact kernels
                kept[name, worker.name] = {**known, **batch.outputs}
        for kind in dict.fromkeys(self.outcome.kinds.values()):
            members = [name for name, other in self.outcome.kinds.items() if other == kind]
            self._elect_kind(kind, members, votes)
        for worker in list(self.workers):
            try:
                worker.request("elect", self.outcome.golden.get(worker.kind, {}))
                worker.answer()
            except DeviceLostError as error:
                self._lose(worker, f"election: {error}")
        self._election_faults(votes, kept)

    def _elect_kind(
        self, kind: str, members: Sequence[str], votes: Mapping[str, Mapping[str, list[int]]]
    ) -> None:
        golden = self.outcome.golden.setdefault(kind, {})
        for kernel, by_device in votes.items():
            mine = {name: digests for name, digests in by_device.items() if name in members}
            exact = kernel.startswith("memory: ")
            election = elect(mine)
            if exact:  # its result is known
                golden[kernel] = 0
            elif election.golden is None:
                if mine:
                    self.outcome.unresolved.append(f"{kernel} on {', '.join(mine)}")
                continue
            else:
                golden[kernel] = election.golden
            for name, digests in mine.items():
                wrong = sum(value != golden[kernel] for value in digests)
                if 2 * wrong > len(digests):
                    self.outcome.odd.append((kernel, name))

    def _election_faults(
        self,
        votes: Mapping[str, Mapping[str, list[int]]],
        kept: Mapping[tuple[str, str], Mapping[int, Tensor | None]],
    ) -> None:
        """Add the deviating results of the election, of devices whose other results are golden."""
        kinds = self.outcome.kinds
        for kernel, by_device in votes.items():
            for name, digests in by_device.items():
                golden = self.outcome.golden[kinds[name]].get(kernel)
                if golden is None or (kernel, name) in self.outcome.odd:
                    continue
                for number, value in enumerate(digests, 1):
                    if value == golden:
                        continue
                    bad = kept[kernel, name].get(value)
                    good = self._golden_output(kinds[name], kernel) if bad is not None else None
                    shape = analyse(good, bad) if good is not None and bad is not None else None
                    seconds = time.monotonic() - self._began
                    fault = DeviatingResult(name, kernel, START, number, seconds, shape)
                    self.outcome.faults[name].append(fault)

    # -- batches

    def _kernel(self, name: str) -> None:
        """Run a kernel on each device alone and on all together."""
        for turn in range(len(self.workers) + (len(self.workers) > 1)):
            if turn and self._ended():
                break
            self._turn(name, min(turn, len(self.workers)))

    def _exchange(self, kinds: int, limit: float) -> None:
        """Run one exchange; none any more once it failed, or a device is lost. limit: seconds of the stress."""
        assert self.links
        links = self.links
        if not links.usable or links.workers != self.workers:
            links.links.error = links.links.error or "a device is lost"
            self.outcome.spent.pop(LINKS)
            return
        share = limit / (kinds * links.round_length * 4)
        name = links.batch(share, self._lose, self._epoch)
        self._report(name, "among the devices")

    def _turn(self, kernel: str, turn: int) -> None:
        """Run a kernel on device number `turn` alone, after the last device on all together."""
        alone = turn < len(self.workers)
        chosen = [self.workers[turn]] if alone else self.workers
        mode = ALONE if alone else TOGETHER
        self._report(kernel, f"{chosen[0].name if alone else 'all'} {mode}")
        per = max(self._per_repetition.get(kernel, LEAST_SECONDS), 1e-6)
        parts = len(self.kernels) * (len(self.workers) + 1) * 4
        target = min(max(self.limit / parts, LEAST_SECONDS), MOST_SECONDS)
        repetitions = min(max(int(target / per), 1), self.most_repetitions)
        for worker, batch in self._together(chosen, kernel, repetitions):
            modes = (START, ALONE, TOGETHER)
            before = sum(self.outcome.counts.get((worker.name, kernel, mode), 0) for mode in modes)
            self._count(worker, kernel, mode, batch)
            for deviation in batch.deviations:
                self._fault(worker, kernel, mode, before, deviation)

    def _report(self, work: str, where: str) -> None:
        share = min((time.monotonic() - self._began) / self.limit, 1.0) if self.limit else 1.0
        faulty = len(self.outcome.faulty)
        self.progress(share, f"{work}, {where}{f', {faulty} faulty' if faulty else ''}")

    def _together(
        self, chosen: Sequence[DeviceWorker], kernel: str, repetitions: int
    ) -> list[tuple[DeviceWorker, KernelRepetitions]]:
        """Run a batch on all chosen devices at once. A device without an answer is left out from then on."""
        asked: list[DeviceWorker] = []
        found: list[tuple[DeviceWorker, KernelRepetitions]] = []
        for worker in list(chosen):
            try:
                worker.request("batch", kernel, repetitions)
                asked.append(worker)
            except DeviceLostError as error:
                self._lose(worker, f"{kernel}: {error}")
        for worker in asked:
            try:
                found.append((worker, worker.answer()))
            except DeviceLostError as error:
                self._lose(worker, f"{kernel}: {error}")
        return found

    def _lose(self, worker: DeviceWorker, reason: str) -> None:
        self.outcome.lost[worker.name] = reason
        self.workers = [other for other in self.workers if other is not worker]

    def _count(self, worker: DeviceWorker, kernel: str, mode: str, batch: KernelRepetitions) -> None:
        key = worker.name, kernel, mode
        self.outcome.counts[key] = self.outcome.counts.get(key, 0) + len(batch.digests)

    def _fault(self, worker: DeviceWorker, kernel: str, mode: str, before: int, deviation: Deviation) -> None:
        faults = self.outcome.faults[worker.name]
        shape = None
        if deviation.output is not None and len(faults) < MOST_SHAPES:
            good = self._golden_output(worker.kind, kernel)
            shape = analyse(good, deviation.output) if good is not None else None
        seconds = deviation.at - self._epoch
        faults.append(
            DeviatingResult(worker.name, kernel, mode, before + deviation.repetition + 1, seconds, shape)
        )

    def _golden_output(self, kind: str, kernel: str) -> Tensor | None:
        """Return the golden values from the first device of this kind that gives them."""
        if (kind, kernel) not in self._outputs:
            self._outputs[kind, kernel] = None
            for worker in [worker for worker in self.workers if worker.kind == kind]:
                try:
                    worker.request("golden_output", kernel)
                    output = worker.answer()
                except DeviceLostError as error:
                    self._lose(worker, f"{kernel}: {error}")
                    continue
                if output is not None:
                    self._outputs[kind, kernel] = output
                    break
        return self._outputs[kind, kernel]

    def _ended(self) -> bool:
        return self.stop() or time.monotonic() - self._began >= self.limit
