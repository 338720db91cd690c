"""Ray through a stand-in for its module. tests/faults has the real one."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runtime.errors import UserError
from study.executors import ray_executor as ray_tasks
from study.executors.child_process import EXIT_INTERRUPTED
from study.executors.executor import Ended, Message, Notice, Started, Task, TaskProgress
from study.executors.ray_executor import RayExecutor, start_process


class FakeRay(ModuleType):
    """Tasks stay until a test ends them."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[tuple[list[str], str, str]] = []
        self.options: dict[str, Any] = {}
        self.gone: dict[int, int | Exception] = {}  # reference -> exit status of the process, or Ray's error
        self.exceptions = SimpleNamespace(RayError=LookupError)
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

    def get(self, reference: int) -> int:
        end = self.gone[reference]
        if isinstance(end, Exception):
            raise end
        return end

    def cancel(self, reference: int) -> None:
        self.cancelled.append(reference)
        self.gone[reference] = LookupError("cancelled")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    built = Clock()
    monkeypatch.setattr(ray_tasks, "time", built)
    return built


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> FakeRay:
    built = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", built)
    return built


def executor(slots: int = 0) -> RayExecutor:
    return RayExecutor("auto", slots, {"num_cpus": 2})


def a_task(folder: Path, name: str) -> Task:
    (folder / name).mkdir(exist_ok=True)
    return Task(folder / name / "plan.json", folder / "log")


def poll(built: RayExecutor, times: int = 12) -> list[Message]:
    return [message for _ in range(times) for message in built.poll(1.0)]


def test_a_task_is_a_ray_task(ray: FakeRay, tmp_path: Path) -> None:
    built = executor(slots=7)
    assert built.slots() == 7
    assert {"num_cpus": 2, "max_retries": ray_tasks.RETRIES}.items() <= ray.options.items()
    built.submit(a_task(tmp_path, "B0"))
    (command, folder, log) = ray.calls[0]
    assert command == [sys.executable, "-m", "scripts.train", str(tmp_path / "B0" / "plan.json")]
    assert (folder, log) == (str(Path.cwd()), str(tmp_path / "log"))


def test_a_run_starts_with_its_first_line_and_ends_with_its_process(ray: FakeRay, tmp_path: Path) -> None:
    built, metrics = executor(), tmp_path / "B0" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"event": "train", "iteration": 2}\n')  # of an earlier process
    built.submit(a_task(tmp_path, "B0"))
    assert poll(built) == []
    with metrics.open("a") as file:
        file.write('{"event": "train", "iteration": 3}\n')
    found = poll(built)
    assert [type(message) for message in found] == [Started, TaskProgress]
    (tmp_path / "log").write_text("words\n")
    ray.gone[0] = 4
    assert poll(built) == [Ended("B0", 4, "words")]


def test_a_run_that_was_lost_or_that_its_node_interrupted_is_retried(ray: FakeRay, tmp_path: Path) -> None:
    built = executor()
    for name in ("B0", "B1"):
        built.submit(a_task(tmp_path, name))
    ray.gone |= {0: EXIT_INTERRUPTED, 1: LookupError("the node died")}
    ends = {one.name: one.status for one in poll(built) if isinstance(one, Ended)}
    assert ends == {"B0": None, "B1": None}


def test_what_no_node_can_take_is_said_once(ray: FakeRay, clock: Clock, tmp_path: Path) -> None:
    built = executor()
    built.submit(a_task(tmp_path, "B0"))
    assert poll(built, 25) == []
    (notice,) = poll(built, 60)
    assert isinstance(notice, Notice)
    assert "num_cpus=2; it has {'CPU': 1.0}" in notice.text
    assert clock.now >= ray_tasks.UNPLACED_SECONDS


def test_at_the_end_of_the_driver_its_runs_save(ray: FakeRay, clock: Clock, tmp_path: Path) -> None:
    built = executor()
    for name in ("B0", "B1"):
        built.submit(a_task(tmp_path, name))
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
            start([sys.executable, "-c", code], str(tmp_path), str(tmp_path / "log"))
    assert (tmp_path / "saved").exists()


def test_without_ray_or_its_cluster_the_fix_is_named(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.error = ConnectionError("Could not find\n any running Ray instance")
    with pytest.raises(
        UserError, match=r"no Ray cluster at CONFIG_RAY_ADDRESS=auto: Could not find any .*ray start"
    ):
        executor()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="Ray is not installed; fix"):
        executor()
