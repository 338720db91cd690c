"""Ray through a stand-in for its module. tests/faults has the real one."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runtime.errors import UserError
from study.executors import ray_executor as ray_tasks
from study.executors.child_process import EXIT_INTERRUPTED
from study.executors.claims import claimed
from study.executors.executor import Ended, Message, Started, Task, TaskProgress, write_exit
from study.executors.ray_executor import RayExecutor, start_process


class FakeRay(ModuleType):
    """Tasks stay until a test ends them."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[tuple[list[str], str, str]] = []
        self.options: dict[str, Any] = {}
        self.gone: set[int] = set()
        self.cancelled: list[int] = []
        self.error: Exception | None = None

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        if self.error:
            raise self.error

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        self.options = options
        ray = self

        class Remote:
            def remote(self, *arguments: Any) -> int:
                ray.calls.append(arguments)  # type: ignore[arg-type]
                return len(ray.calls) - 1

        return lambda function: Remote()

    def wait(self, references: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        assert 0 < num_returns <= len(references)  # else Ray raises ValueError
        done = [reference for reference in references if reference in self.gone]
        return done, [reference for reference in references if reference not in self.gone]

    def cancel(self, reference: int) -> None:
        self.cancelled.append(reference)
        self.gone.add(reference)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    built = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", built)
    return built


class Clock:
    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def executor(ray: FakeRay, slots: int = 0) -> tuple[RayExecutor, Clock]:
    clock = Clock()
    return RayExecutor("auto", slots, 2, 1, lambda: clock.now, clock.sleep), clock


def a_task(folder: Path, name: str) -> Task:
    (folder / name).mkdir()
    return Task(name, ("study", "B", "0"), folder / name, folder / "log")


def poll(built: RayExecutor, times: int = 12) -> list[Message]:
    return [message for _ in range(times) for message in built.poll(1.0)]


def test_a_task_is_a_ray_task_that_ray_does_not_repeat(ray: FakeRay, tmp_path: Path) -> None:
    built, _ = executor(ray, slots=7)
    assert built.slots() == 7
    assert ray.options == {"num_cpus": 2, "num_gpus": 1, "max_retries": 0}
    built.submit(a_task(tmp_path, "B0"))
    (command, folder, place) = ray.calls[0]
    assert command[:3] == [sys.executable, "-m", "study.executors.executor"]
    assert (folder, place) == (str(Path.cwd()), "ray")


def test_a_run_starts_with_its_claim_and_ends_with_its_exit_file(ray: FakeRay, tmp_path: Path) -> None:
    built, _ = executor(ray)
    built.submit(a_task(tmp_path, "B0"))
    assert poll(built) == []
    with claimed(tmp_path / "B0") as claim:
        (tmp_path / "B0" / "metrics.jsonl").write_text('{"event": "train", "iteration": 3}\n')
        found = poll(built)
    assert found[0] == Started("B0", claim.holder.host)
    assert set(map(type, found[1:])) == {TaskProgress}
    write_exit(tmp_path / "B0", Ended("B0", 4, "words", "note", {"peak_bytes": 5}))
    ray.gone.add(0)
    assert poll(built) == [Ended("B0", 4, "words", "note", {"peak_bytes": 5})]


def test_a_task_without_an_exit_file_was_lost(ray: FakeRay, tmp_path: Path) -> None:
    built, _ = executor(ray)
    task = a_task(tmp_path, "B0")
    write_exit(task.folder, Ended("B0", 0))  # of an earlier process
    built.submit(task)
    ray.gone.add(0)
    assert poll(built, 3) == []  # the file may still appear
    assert poll(built) == [Started("B0"), Ended("B0", None)]


def test_a_run_that_its_node_interrupted_is_retried(ray: FakeRay, tmp_path: Path) -> None:
    built, _ = executor(ray)
    for name in ("B0", "B1"):
        built.submit(a_task(tmp_path, name))
        write_exit(tmp_path / name, Ended(name, EXIT_INTERRUPTED, "saved"))
    built.stop("B1")
    ray.gone.add(0)
    found = poll(built)
    assert found == [Started("B0"), Ended("B0", None), Started("B1"), Ended("B1", EXIT_INTERRUPTED, "saved")]


def test_at_the_end_of_the_driver_its_runs_save(ray: FakeRay, tmp_path: Path) -> None:
    built, clock = executor(ray)
    for name in ("B0", "B1"):
        built.submit(a_task(tmp_path, name))
    write_exit(tmp_path / "B0", Ended("B0", EXIT_INTERRUPTED))
    assert built.close() == ""
    assert ray.cancelled == [0, 1]
    assert clock.now < ray_tasks.STOP_SECONDS


def test_a_cancelled_process_gets_sigterm_and_is_awaited(tmp_path: Path) -> None:
    """ray.cancel raises KeyboardInterrupt in the task."""
    code = "import signal, sys, time; signal.signal(15, lambda *a: (open('saved', 'w').close(), sys.exit())); open('up', 'w').close(); time.sleep(600)"  # noqa: E501
    start, wait = start_process(), subprocess.Popen.wait
    raised: list[bool] = []

    def interrupted(process: Any, timeout: float | None = None) -> int:
        if not raised:
            while not (tmp_path / "up").exists():
                threading.Event().wait(0.01)
            raised.append(True)
            raise KeyboardInterrupt
        return wait(process, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start([sys.executable, "-c", code], str(tmp_path), "ray")
    assert (tmp_path / "saved").exists()


def test_without_ray_or_its_cluster_the_fix_is_named(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.error = ConnectionError("Could not find\n any running Ray instance")
    with pytest.raises(
        UserError, match=r"no Ray cluster at CONFIG_RAY_ADDRESS=auto: Could not find any .*ray start"
    ):
        executor(ray)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="Ray is not installed; fix"):
        executor(ray)
