"""Workers: their answers, their environment, failures, time limits, and their end."""

import os

import pytest

from bench.runner import BenchError, BenchWorker, case_worker
from study.executors.child_process import KEEP_HEAP, SPIN_COUNT, process_settings
from tests.bench import worker_calls
from tests.bench.sessions import SHAPE

NAMES = ("GLIBC_TUNABLES", "GOMP_SPINCOUNT")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


def test_a_worker_has_the_environment_of_a_training_process_and_this_process_is_unchanged() -> None:
    with case_worker(SHAPE, "B", 4) as worker:
        found = worker.call(worker_calls.environment, *NAMES)
    training = process_settings(os.environ)
    assert found == {name: training[name] for name in NAMES}
    assert found == {"GLIBC_TUNABLES": KEEP_HEAP, "GOMP_SPINCOUNT": SPIN_COUNT}
    assert not set(NAMES) & set(os.environ)


def test_a_failed_call_gives_the_exception_and_the_worker_continues() -> None:
    with BenchWorker("B at micro-batch 4") as worker:
        with pytest.raises(BenchError, match=r"^B at micro-batch 4: ValueError: no such case$"):
            worker.call(worker_calls.fail, "no such case")
        with pytest.raises(BenchError, match=r"^B at micro-batch 4: error: 7 is too few$"):
            worker.call(worker_calls.refuse, "7 is too few")
        assert worker.call(worker_calls.process_id) == worker.process.pid


def test_a_worker_that_ends_is_reported_by_its_signal_and_its_last_words() -> None:
    with BenchWorker("a worker") as worker:
        for _ in range(2):  # at once, however often it is called
            with pytest.raises(
                BenchError, match=r"a worker: killed by SIGKILL.*; last message: out of pages"
            ):
                worker.call(worker_calls.end_by_signal)
