"""The processes of one run ("ranks"): their numbers, what they share out, and what they agree on.

A run has one process unless `join` finds torchrun's variables. Alone, every function returns its argument, and
torch.distributed is not loaded. Every function here that exchanges data is called by all ranks in the same order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

from gpt2.system.errors import UserError
from gpt2.system.resource_errors import out_of_memory
from gpt2.system.signals import Interrupted

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
    """Whether this process was started as a rank: by gpt2.system.rank_launcher, or by torchrun."""
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
