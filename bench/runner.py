"""Measure cases in interleaved rounds (A B C A B C), so that drift of the machine affects all cases alike.

A ratio is taken within a round. The reported value is its median over the rounds.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any, Self, TypeVar

from bench.case_step import Change, time_case
from bench.cases import BASELINE, PLAIN, Shape, Sizes
from bench.suite import SuiteSession, spread
from gpt2.measured_memory import EXACT_HEAP
from runtime.errors import UserError, one_line
from study.executors.child_process import KEEP_HEAP, exit_text, process_settings

# Start worker processes, call functions in them, and stop them. Every measurement of the benches runs in a worker.


T = TypeVar("T")
EXIT_SECONDS = 60.0  # until a worker that gets no more calls is killed
MESSAGE_LINES, MESSAGE_CHARACTERS = 3, 600


class BenchError(UserError, RuntimeError):
    """A case could not be measured."""


def last_lines(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-MESSAGE_LINES:])[:MESSAGE_CHARACTERS] or "no message"


class BenchWorker:
    """A process that executes calls in the environment of a training process. Leaving the context ends it.

    label: names the worker in errors. heap: see `process_settings`. Its output goes to a temporary file.
    """

    def __init__(self, label: str, heap: str | None = None) -> None:
        self.label = label
        self._output = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=_execute_calls, args=(other, self._output.name))
        settings = process_settings(os.environ, heap)
        added = settings.keys() - os.environ.keys()
        os.environ.update(settings)
        try:
            self.process.start()
        finally:
            other.close()
            for name in added:
                del os.environ[name]

    def call(self, function: Callable[..., T], *arguments: Any, limit_seconds: float | None = None) -> T:
        """Call a function in the worker and return its result.

        BenchError, with the reason, if it raises, if the process ends, or if it exceeds the limit and is killed.
        """
        with contextlib.suppress(OSError):  # the process may have ended
            self._connection.send((function, arguments))
        if wait([self._connection, self.process.sentinel], limit_seconds):
            with contextlib.suppress(EOFError, OSError):
                # A compiler started by an ended worker can keep the pipe open: poll, since recv would wait for it.
                if self._connection.poll():
                    succeeded, result = self._connection.recv()
                    if succeeded:
                        return result  # type: ignore[no-any-return]
                    raise BenchError(f"{self.label}: {result}")
            self.process.join(EXIT_SECONDS)
            reason = exit_text(self.process.exitcode or 0)
        else:
            self.process.kill()
            reason = f"no answer within {limit_seconds:,.0f} s, so it was killed"
        self._output.seek(0)
        raise BenchError(f"{self.label}: {reason}; last message: {last_lines(self._output.read())}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *others: object) -> None:
        """End the process. Kill it after an error, or if it does not exit within EXIT_SECONDS."""
        self._connection.close()
        self.process.join(0.0 if error else EXIT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._output.close()


def _execute_calls(connection: Connection, output: str) -> None:
    """Execute calls until the bench closes the connection. Send (True, result) or (False, error) for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the bench, which ends its workers
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except UserError as error:
            answer = (False, f"error: {error}")
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {one_line(error)}"[:MESSAGE_CHARACTERS])
        connection.send(answer)


Case = tuple[str, int]  # name, micro-batch
LIMIT_SECONDS = 600.0  # of a turn: a new worker loads torch and compiles
SLOWER = 10  # times the seconds of a turn, added to the limit: a turn has at least one step, however long
PEAKS = {  # whether on a CPU -> note under a table
    True: "Peaks: growth of the resident set over optimizer steps, in another process whose heap returns buffers.",
    False: "Peaks: the allocator's peak during the timed steps, without compilation.",
}


@dataclass(frozen=True)
class CaseTiming:
    """One case in one round."""

    case: str
    micro: int
    round: int
    step_seconds: float  # median of the timed optimizer steps
    tokens_per_second: float
    peak_bytes: int  # of the timed steps only
    flops_per_token: float  # by this project's formula


def case_worker(shape: Sizes, case: str, micro: int) -> BenchWorker:
    """Start a worker for a case, with the heap of a training process, or with the system's for the plain case."""
    return BenchWorker(f"{shape.name}, {case} at micro-batch {micro}", None if case == PLAIN else KEEP_HEAP)


def measure_case(
    shape: Shape, case: str, micro: int, seconds: float, change: Change | None = None
) -> dict[str, Any]:
    """Time a case in a new worker. BenchError where it fails, such as out of memory. change: see case_step."""
    with case_worker(shape, case, micro) as worker:
        limit = LIMIT_SECONDS + SLOWER * seconds
        return worker.call(time_case, shape, case, micro, seconds, change, limit_seconds=limit)


@functools.cache
def exact_peak(shape: Shape, case: str, micro: int) -> int:
    """Return the peak bytes of an optimizer step on a CPU, from a new worker under EXACT_HEAP.

    The heap of a training process keeps freed buffers, so that its resident peak varies.
    """
    with BenchWorker(f"peak of {shape.name}, {case} at micro-batch {micro}", EXACT_HEAP) as worker:
        return int(worker.call(time_case, shape, case, micro, 0.0, limit_seconds=LIMIT_SECONDS)["peak_bytes"])


def measure_shape(shape: Shape, session: SuiteSession, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure every case of a shape once a round and return its rows. Report and skip a case that fails.

    data: content of the JSON file; the shape is added to its "shapes". It is saved after every round.
    """
    samples, skipped, rows = list[CaseTiming](), dict[Case, str](), list[dict[str, Any]]()
    saved: dict[str, Any] = {"shape": asdict(shape)}
    data.setdefault("shapes", []).append(saved)
    for number in range(session.rounds):
        for case, micro in (key for key in shape.cases if key not in skipped):
            try:
                values = measure_case(shape, case, micro, session.seconds)
                if session.on_cpu:
                    values["peak_bytes"] = exact_peak(replace(shape, cases=()), case, micro)
            except BenchError as error:
                skipped[case, micro] = str(error)
                session.say(f"skipped: {error}")
                continue
            samples.append(CaseTiming(case, micro, number, **values))
            speed = f"{values['tokens_per_second']:,.0f} tok/s"
            session.say(f"round {number + 1}/{session.rounds}  {shape.name}  {case} micro {micro}: {speed}")
        rows = rows_of(shape, samples, session.resolved.target.peak_flops)
        saved |= {"rows": rows, "samples": list(map(asdict, samples)), "skipped": list(skipped.values())}
        session.save(data)
    return rows


def rows_of(shape: Shape, samples: Sequence[CaseTiming], peak_flops: float | None) -> list[dict[str, Any]]:
    """Return one row a case: medians, and ratios of speed and memory.

    to_plain: to the plain case at its default micro-batch. The other ratios are to the plain case and to B at the same
    micro-batch. None if the other case was not measured.
    """
    rows = []
    for case, micro in shape.cases:
        key, plain, baseline = (case, micro), (PLAIN, micro), (BASELINE, micro)
        measured = samples_of(samples, key)
        if not measured:
            continue
        speed = median(sample.tokens_per_second for sample in measured)
        rows.append(
            {
                "shape": shape.name,
                "block_size": shape.block_size,
                "case": case,
                "micro": micro,
                "accumulation": shape.accumulation(micro),
                "tokens_per_second": speed,
                "step_seconds": median(sample.step_seconds for sample in measured),
                "mfu": speed * measured[0].flops_per_token / peak_flops if peak_flops else None,
                "peak_bytes": median(sample.peak_bytes for sample in measured),
                "to_plain": speed_ratio(samples, key, (PLAIN, shape.plain_micro)),
                "to_plain_same_micro": speed_ratio(samples, key, plain),
                "to_baseline": None if case == PLAIN else speed_ratio(samples, key, baseline),
                "memory_to_plain_same_micro": memory_ratio(samples, key, plain),
                "memory_to_baseline": memory_ratio(samples, key, baseline),
            }
        )
    return rows


def samples_of(samples: Sequence[CaseTiming], case: Case) -> list[CaseTiming]:
    return [sample for sample in samples if (sample.case, sample.micro) == case]


def speed_ratio(samples: Sequence[CaseTiming], case: Case, to: Case) -> dict[str, float] | None:
    """Return the spread of the speed of `case` over that of `to`, in the rounds that have both. None for one name."""
    other = {sample.round: sample.tokens_per_second for sample in samples_of(samples, to)}
    pairs = [(s.tokens_per_second, other[s.round]) for s in samples_of(samples, case) if s.round in other]
    return spread([one / two for one, two in pairs]) if case[0] != to[0] else None


def memory_ratio(samples: Sequence[CaseTiming], case: Case, to: Case) -> float | None:
    """Divide the median peak of `case` by that of `to`; None for the same case or a missing one."""
    one, other = ([s.peak_bytes for s in samples_of(samples, key)] for key in (case, to))
    return median(one) / median(other) if one and other and case != to else None
