"""The suite of scale: every arrangement is timed in every round, by processes that train together."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import processes
from bench.suite import SuiteResult
from bench.suites import executors, scale
from bench.workers import BenchWorker
from gpt2.system import ranks
from study.executors.child_process import Slot
from tests.bench.sessions import run_small

SMALL = processes.TrainedShape("small", 2, 2, 16, 8, 4, 1)


class ThisProcess(contextlib.nullcontext[Any]):
    """The worker of rank 0, in this process, which has loaded torch."""

    def __enter__(self) -> Any:
        return self

    def call(self, function: Callable[..., Any], *arguments: Any, limit_seconds: float) -> Any:
        return function(*arguments)


@pytest.fixture
def first_rank_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let rank 0 of two be this process. One rank alone has 100 tokens/s."""
    plain = processes.open_processes

    def opened(chosen: Sequence[processes.Process]) -> Any:
        return plain(chosen) if len(chosen) > 1 else contextlib.nullcontext(lambda seconds: [100.0])

    def worker(name: str, heap: str) -> Any:
        return ThisProcess() if name.endswith("rank 0") else BenchWorker(name, heap)

    for name in (*ranks.VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # prepare sets them
    monkeypatch.setattr(processes, "open_processes", opened)
    monkeypatch.setattr(processes, "BenchWorker", worker)
    yield
    processes.prepare.cache_clear()
    ranks.leave()


@pytest.mark.usefixtures("one_thread", "first_rank_here")
def test_one_and_two_ranks_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "SHAPES", {"cpu": SMALL})
    chosen = {name: scale.arrangement(name, SMALL, count) for name, count in (("1 rank", 1), ("2 ranks", 2))}
    monkeypatch.setattr(scale, "arrangements", lambda cards, shape: chosen)
    monkeypatch.setattr(
        scale.executors, "run", lambda session: SuiteResult({}, ())
    )  # it has tests of its own
    found = run_small(scale.SUITE, tmp_path, monkeypatch, rounds=2, seconds=0.05)
    assert {name: len(speeds) for name, speeds in found["tokens_per_second"].items()} == {
        "1 rank": 2,
        "2 ranks": 2,
    }
    assert all(speed > 0 for speeds in found["tokens_per_second"].values() for speed in speeds)
    lines = capsys.readouterr().out.splitlines()
    rounds = [line.partition(":")[0] for line in lines if line.startswith("round ")]
    assert rounds == ["round 1/2  1 rank", "round 1/2  2 ranks", "round 2/2  1 rank", "round 2/2  2 ranks"]


@pytest.mark.usefixtures("workers_here")
def test_one_and_two_runs_at_once_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executors, "SHAPES", {"cpu": SMALL})
    monkeypatch.setattr(executors, "local_slots", lambda count, resolved, threads: [Slot("")] * count)
    found = run_small(executors.SUITE, tmp_path, monkeypatch, rounds=2, seconds=0.01)
    assert {
        count: [len(each) for each in speeds] for count, speeds in found["slots"]["tokens_per_second"].items()
    } == {
        "1": [1, 1],
        "2": [2, 2],
    }
    assert "runs  tok/s in all" in capsys.readouterr().out
    processes.prepare.cache_clear()
