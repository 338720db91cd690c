"""The processes of one run ("ranks"): their numbers, what they share out, and what they agree on.

A run has one process unless `join` finds torchrun's variables. Alone, every function returns its argument, and
torch.distributed is not loaded. Every function here that exchanges data is called by all ranks in the same order.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from runtime.detected_hardware import allowed_cpus
from runtime.errors import UserError, disk_full, explain_full_disk, explain_missing_compiler, out_of_memory
from runtime.signals import Interrupted, Stop

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them all
# Variables of launchers, or their beginnings: torchrun, MPI, Slurm, accelerate. Slurm's commands need SLURM_CONF.
LAUNCHERS = (
    *VARIABLES, "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "NODE_RANK", "TORCHELASTIC_", "PET_", "ACCELERATE_",
    "OMPI_COMM_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_COMM_", "SLURM_",
)  # fmt: skip
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}  # ROCm's RCCL is "nccl"
EXIT_RANK_LOST = 9  # of a process whose peer ended or did not answer
T = TypeVar("T")
Rows = TypeVar("Rows", bound=Any)
_joined = {"rank": 0, "world": 1}


class RankLostError(UserError, RuntimeError):
    """Another rank ended, or did not answer within the time limit."""


class UnequalRanksError(UserError, RuntimeError):
    """The ranks differ in something that must be equal."""


def started() -> bool:
    """Whether this process was started as a rank: by runtime.ranks, or by torchrun."""
    return all(name in os.environ for name in VARIABLES)


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a launcher, which started the shell and not this project's process."""
    kept = {name: text for name, text in variables.items() if name == "SLURM_CONF"}
    return {name: text for name, text in variables.items() if not name.startswith(LAUNCHERS)} | kept


def local(name: str, alone: int) -> int:
    """Return LOCAL_RANK or LOCAL_WORLD_SIZE: the number of this rank, or of the ranks, on this host."""
    return int(os.environ.get(name, alone)) if started() else alone


def rank() -> int:
    return _joined["rank"]


def world() -> int:
    return _joined["world"]


def first() -> bool:
    """Whether this is the rank that writes files and prints events."""
    return rank() == 0


def join(device_type: str, timeout_seconds: float) -> None:
    """Join the other ranks, if this process was started as one of several. Call after the device is selected.

    timeout_seconds: longest wait for another rank; then RankLostError. Raises UnequalRanksError where versions of torch
    differ.
    """
    if not started() or int(os.environ["WORLD_SIZE"]) == 1:
        return
    if device_type not in BACKENDS:
        raise UserError(
            f"{device_type} has no communication among processes in torch; fix: set CONFIG_RANKS=1, or "
            "CONFIG_TARGET_CPU=y"
        )
    import torch

    timeout = timedelta(seconds=timeout_seconds)
    joining = ThreadPoolExecutor(
        1
    )  # a signal interrupts the wait for a thread, and not torch's for other ranks
    with exchange():
        joining.submit(torch.distributed.init_process_group, BACKENDS[device_type], timeout=timeout).result()
    _joined.update(rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size())
    require_equal({"torch": torch.__version__}, "install the same version of torch on every host")


def leave() -> None:
    """Leave the group after the last exchange."""
    if world() > 1:
        import torch

        torch.distributed.destroy_process_group()
        _joined.update(rank=0, world=1)


def share(rows: Rows) -> Rows:
    """Return this rank's contiguous part of the rows, whose number the ranks divide evenly."""
    each, rest = divmod(len(rows), world())
    assert rest == 0
    mine: Rows = rows[rank() * each : (rank() + 1) * each] if world() > 1 else rows
    return mine


def agree(*flags: object) -> list[bool]:
    """Return for each flag whether it is true on any rank."""
    if world() == 1:
        return [bool(flag) for flag in flags]
    import torch

    votes = torch.tensor([bool(flag) for flag in flags], dtype=torch.uint8)
    with exchange():
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


def together(work: Callable[[], T]) -> T:
    """Return work(). If a request to stop or a lack of memory ended it on any rank, raise that on every rank."""
    if world() == 1:
        return work()
    result, error = None, None
    try:
        result = work()
    except (Exception, Interrupted) as caught:
        if not isinstance(caught, Interrupted) and not out_of_memory(caught):
            raise
        error = caught
    stopped, exhausted = agree(isinstance(error, Interrupted), error and not isinstance(error, Interrupted))
    if error:
        raise error
    if exhausted:
        raise MemoryError("another rank ran out of memory")
    if stopped:
        raise Interrupted("a signal to another rank")
    return result  # type: ignore[return-value]


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks."""
    if world() == 1:
        return [value]
    import torch

    values: list[Any] = [None] * world()
    with exchange():
        torch.distributed.all_gather_object(values, value)
    return values


def map_shared(
    function: Callable[[T], Any], items: Sequence[T], stop: Callable[[], None] | None
) -> list[Any]:
    """Return [function(item) for item in items]; rank r computes every world-th item from r on.

    stop: called before each item; raises to end the work. A request to stop, or a lack of memory, of any rank is raised
    on every rank.
    """
    stop = stop or (lambda: None)

    def compute(item: T) -> Any:
        stop()
        return function(item)

    parts = gather(together(lambda: [compute(item) for item in items[rank() :: world()]]))
    return [parts[number % world()][number // world()] for number in range(len(items))]


def require_equal(values: Mapping[str, object], fix: str) -> None:
    """Raise UnequalRanksError on every rank where one of the named values differs between ranks."""
    found = gather(dict(values))
    for number, other in enumerate(found):
        for name, value in found[0].items():
            if other.get(name) != value:
                raise UnequalRanksError(
                    f"rank {number} has {name} {other.get(name)}, rank 0 has {name} {value}; fix: {fix}"
                )


@contextlib.contextmanager
def exchange() -> Iterator[None]:
    """Raise torch's errors of an exchange as RankLostError. All of them are RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        reason = (f"{error}".strip().splitlines() or [type(error).__name__])[0]
        number, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        raise RankLostError(
            f"rank {number} of {count} has lost another rank, which ended or did not answer within "
            f"CONFIG_RANKS_TIMEOUT ({reason}); fix: make (it continues from the last checkpoint)"
        ) from error


GRACE_SECONDS = 30.0  # for the other ranks to end after the first one failed; then SIGKILL
POLL_SECONDS = 0.05


COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_COMPILE_THREADS = 32  # of a process, as in torch


class Rank:
    """One process of the run. Rank 0 has the launcher's standard output; all other output goes to standard error."""

    def __init__(self, number: int, count: int, port: int, command: Sequence[str]) -> None:
        self.number = number
        self.last_line = ""
        variables = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        threads = min(MOST_COMPILE_THREADS, max(1, len(allowed_cpus()) // count))
        address[COMPILE_THREADS] = os.environ.get(
            COMPILE_THREADS, str(threads)
        )  # else of each rank as many as CPUs
        self.process = subprocess.Popen(
            command,
            env=os.environ | {name: str(value) for name, value in variables.items()} | address,
            stdin=subprocess.DEVNULL,
            stdout=None if number == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE if number == 0 else subprocess.STDOUT,
            text=True,
            errors="replace",
            close_fds=False,  # the ranks hold the study's lock, too
        )
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    def _copy_output(self) -> None:
        for line in self.process.stderr or self.process.stdout or ():
            self.last_line = line.strip() or self.last_line
            print(line, end="", file=sys.stderr, flush=True)

    def wait(self) -> None:
        self.process.wait()
        self._reader.join(timeout=GRACE_SECONDS)  # a process that the rank started may keep the pipe open


def launch(count: int, command: Sequence[str], stop: Stop) -> int:
    """Run `count` ranks of the command to their end. Return the exit status of the rank that ended the run.

    That is the first that failed otherwise than by the loss of another rank; negative where a signal ended it. Its last
    line is repeated on standard error.
    """
    port = free_port()
    ranks = [Rank(number, count, port, command) for number in range(count)]
    cause: Rank | None = None
    deadline, passed_on = float("inf"), False
    while True:
        running = [rank for rank in ranks if rank.process.poll() is None]
        failed = [rank for rank in ranks if rank.process.poll()]
        cause = cause or _cause(failed)
        if not running:
            break
        if stop.requested and not passed_on:
            passed_on = True
            for rank in running:
                rank.process.send_signal(signal.SIGTERM)
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for rank in running:
                rank.process.kill()
            break
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        rank.wait()
    cause = cause or next((rank for rank in ranks if rank.process.returncode == EXIT_RANK_LOST), None)
    if cause is None:
        return 0
    status = cause.process.returncode
    if status < 0:
        print(f"error: rank {cause.number} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    elif cause.last_line.startswith("error: "):
        print(cause.last_line, file=sys.stderr)
    return status


def _cause(ranks: Sequence[Rank]) -> Rank | None:
    """Return the rank that a signal ended, else the first that failed otherwise than by the loss of another."""
    causes = [rank for rank in ranks if rank.process.returncode != EXIT_RANK_LOST]
    return min(causes, key=lambda rank: (rank.process.returncode > 0, rank.number), default=None)


def end_like(status: int) -> int:
    """Return an exit status; where it is negative, end this process by that signal."""
    if status < 0:
        number = signal.Signals(-status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        sys.stderr.flush()
        os.kill(os.getpid(), number)
    return status


def free_port() -> int:
    """Return a port of this host that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Failure(NamedTuple):
    """Status of the run, its error (None where the run can continue as it is), and a note."""

    status: str
    error: str | None
    note: str | None


def describe_failure(error: Exception, directory: Path, micro: int) -> Failure:
    """Return the failure of a run in `directory`, at this micro-batch.

    After a full disk or the loss of another rank the run counts as interrupted.
    """
    if number := disk_full(error):
        return Failure("interrupted", None, explain_full_disk(number, directory)[0])
    if isinstance(error, RankLostError):
        return Failure("interrupted", None, f"{error}".partition("; fix")[0])
    if out_of_memory(error):
        return Failure("failed", f"out of memory at micro-batch {micro}: {error}", None)
    explained = explain_missing_compiler(error)
    return Failure("failed", explained or f"{type(error).__name__}: {error}", None)
