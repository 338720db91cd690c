"""The error of a process, the lock that it holds, and the requests that end it immediately."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import UserError
from study.executors.child_process import (
    EXIT_FAILED,
    KEEP_HEAP,
    SPIN_COUNT,
    Session,
    Slot,
    StopAsked,
    process_settings,
)
from study.executors.executor import Ended, LocalExecutor, Message, Started, Task
from study.preconditions import locked


class Fake:
    """A child that records its signals."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def send_signal(self, number: int) -> None:
        self.done.append(signal.Signals(number).name)

    def kill(self) -> None:
        self.done.append("killed")


@pytest.mark.parametrize(
    ("asked", "done"),
    [
        (["SIGHUP", "SIGHUP"], ["SIGTERM"]),
        (["SIGTERM", "SIGINT"], ["SIGTERM"]),
        (["SIGINT", "SIGTERM", "SIGINT"], ["SIGTERM", "killed"]),
    ],
)
def test_a_request_reaches_every_run_and_only_a_second_interrupt_ends_them_at_once(
    asked: list[str], done: list[str]
) -> None:
    session, children = Session(), [Fake(), Fake()]
    session.children.extend(children)  # type: ignore[arg-type]
    for name in asked:
        session._ask(signal.Signals[name], None)
    assert [child.done for child in children] == [done] * 2
    assert session.asked == len(asked)


def test_without_a_process_a_request_stops_the_study_and_later_requests_are_ignored() -> None:
    session = Session()
    with pytest.raises(StopAsked):
        session._ask(signal.SIGTERM, None)
    session.close()
    session._ask(signal.SIGTERM, None)
    with pytest.raises(StopAsked):
        session.start(Path("plan.json"), Path("log"), Slot(""))


def test_the_reported_error_is_that_of_this_process(tmp_path: Path) -> None:
    task = Task(tmp_path / "B0" / "plan.json", tmp_path / "log.txt")
    task.folder.mkdir()
    task.log.write_text("error: an older process's words\n")
    executor = LocalExecutor(Session(), [Slot("slot 0")])
    executor.submit(task)  # there is no plan
    started, ended = run_to_end(executor)
    assert started == Started("B0", "slot 0")
    assert isinstance(ended, Ended)
    assert (ended.status, ended.answer) == (EXIT_FAILED, None)
    assert "plan.json" in ended.message
    assert ended.message.startswith("error: ")


def run_to_end(executor: LocalExecutor) -> list[Message]:
    found: list[Message] = []
    while not any(isinstance(message, Ended) for message in found):
        found += executor.poll(1.0)
    return found


def test_the_lock_is_held_until_its_process_ends(tmp_path: Path) -> None:
    with locked(tmp_path) as lock:
        holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    with (
        pytest.raises(
            UserError, match=f"process {os.getpid()} .*or by its training process, which still saves"
        ),
        locked(tmp_path),
    ):
        pass
    holder.communicate(b"\n")
    with locked(tmp_path):
        pass


def test_variables_of_a_launcher_and_of_threads_reach_no_training_process() -> None:
    foreign = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "ACCELERATE_MIXED_PRECISION",
        "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_PROC_BIND", "MKL_NUM_THREADS", "MKL_DYNAMIC", "KMP_AFFINITY",
        "OPENBLAS_NUM_THREADS",
    )  # fmt: skip
    kept = {
        "SLURM_CONF": "/etc/slurm.conf",
        "CUDA_VISIBLE_DEVICES": "1",
        "OMP_WAIT_POLICY": "active",
        "PATH": "/bin",
    }
    assert process_settings(dict.fromkeys(foreign, "1") | kept, heap=None) == kept


def test_settings_of_the_environment_take_precedence() -> None:
    assert process_settings({}) == {"GLIBC_TUNABLES": KEEP_HEAP, "GOMP_SPINCOUNT": SPIN_COUNT}
    custom = {"GLIBC_TUNABLES": "", "GOMP_SPINCOUNT": "7"}
    assert process_settings(custom) == custom
    assert "GOMP_SPINCOUNT" not in process_settings({"OMP_WAIT_POLICY": "active"})
