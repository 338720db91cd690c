"""Workers: their answers, the message of a failure, time limits, and their end."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bench import workers
from bench.cases import Shape
from study.runner.child_process import KEEP_HEAP

SHAPE = Shape("small", 2, 2, 16, 8, ())


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let workers run `code` instead of bench.worker."""
    monkeypatch.setattr(workers, "COMMAND", (sys.executable, "-c", code))


@pytest.mark.parametrize("case", ["plain", "RALEARN:hard", "RALEARN:hard:8"])
def test_a_case_is_measured_in_a_process(case: str) -> None:
    found = workers.measure_in_new_worker(SHAPE, case, 4, 0.0)
    assert found["tokens_per_second"] == pytest.approx(4 * 8 / found["step_seconds"])
    assert found["peak_bytes"] > 0


def test_persistent_workers_measure_step_by_step_in_turn_and_end_with_the_bench() -> None:
    with workers.PersistentWorkers() as measure:
        for _ in range(3):
            for case in ("plain", "B"):
                assert measure(SHAPE, case, 4, 0.0)["step_seconds"] > 0
        processes = [worker.process for worker in measure._workers.values()]
        assert len(processes) == 2
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() == 0 for process in processes)


def test_a_case_that_fails_in_its_worker_gives_the_exception() -> None:
    with (
        pytest.raises(workers.BenchError, match=r"small, XB at micro-batch 4: .*XB"),
        workers.PersistentWorkers() as measure,
    ):
        measure(SHAPE, "XB", 4, 0.0)


def test_a_killed_worker_is_reported_by_its_signal() -> None:
    with workers.CaseWorker(SHAPE, "B", 4) as worker:
        assert worker.time_steps(0.0)["step_seconds"] > 0
        worker.process.kill()
        with pytest.raises(workers.BenchError, match="killed by SIGKILL"):
            worker.time_steps(0.0)
        with pytest.raises(
            workers.BenchError, match="killed by SIGKILL"
        ):  # at once, however often it is asked
            worker.time_steps(0.0)


def test_lines_of_libraries_on_the_output_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "print('said by a library\\n[1]\\n{\"step_seconds\": 1.0}')")
    with workers.CaseWorker(SHAPE, "B", 4) as worker:
        assert worker.time_steps(0.0) == {"step_seconds": 1.0}


# --- time limits


def test_a_worker_that_does_not_answer_is_killed_though_its_child_holds_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler that hangs does: it has its parent's pipes and does not end with it."""
    compiler = tmp_path / "compiler"
    stand_in(
        monkeypatch,
        "import pathlib, subprocess, sys, time\n"
        "compiler = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('compiling', file=sys.stderr, flush=True)\n"
        f"pathlib.Path({str(compiler)!r}).write_text(str(compiler.pid))\n"
        "time.sleep(600)",
    )
    monkeypatch.setattr(workers, "FIRST_ANSWER_SECONDS", 1.0)
    with workers.CaseWorker(SHAPE, "B", 4) as worker:
        while not (compiler.exists() and compiler.read_text()):
            assert worker.process.poll() is None
            time.sleep(0.05)
        try:
            with pytest.raises(
                workers.BenchError, match=r"B at micro-batch 4: no answer within 1 s, .*: compiling"
            ):
                worker.time_steps(0.0)
            assert worker.process.returncode == -signal.SIGKILL
            os.kill(int(compiler.read_text()), 0)  # still there, and with it the output's other end
        finally:
            os.kill(int(compiler.read_text()), signal.SIGKILL)


def test_the_time_limit_grows_with_the_seconds_of_a_turn_and_is_longest_before_the_first_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, "import sys\nfor line in sys.stdin: print('{}', flush=True)")
    waited: list[float] = []
    line = workers.Worker._next_line

    def watched(worker: workers.Worker, seconds: float | None) -> str | None:
        assert seconds is not None
        waited.append(seconds)
        return line(worker, seconds)

    monkeypatch.setattr(workers.Worker, "_next_line", watched)
    with workers.CaseWorker(SHAPE, "B", 4) as worker:
        for seconds in (0.0, 0.0, 12.0):
            assert worker.time_steps(seconds) == {}
    later = workers.LATER_ANSWER_SECONDS
    assert waited == pytest.approx(
        [workers.FIRST_ANSWER_SECONDS, later, later + 12 * workers.SLOWER], abs=1.0
    )


def test_a_worker_that_does_not_exit_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(workers, "EXIT_SECONDS", 0.2)
    with workers.CaseWorker(SHAPE, "B", 4) as worker:
        pass
    assert worker.process.returncode == -signal.SIGKILL


# --- messages

COMPILER = """Traceback (most recent call last):
  File "bench.py", line 1, in <module>
    step()
torch._inductor.exc.InductorError: SubprocException: An exception occurred in a subprocess:

Traceback (most recent call last):
  File "codecache.py", line 2, in compile
    build()
RuntimeError: Failed to find C compiler. Please specify via CC environment variable.


Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug to PyTorch).
For even more developer context, set TORCH_LOGS="+dynamo"
"""
MEMORY = """UserWarning: something of no consequence: at all
Traceback (most recent call last):
  File "bench.py", line 1, in <module>
    step()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB.
Exception ignored in atexit callback: <function shutdown>
Traceback (most recent call last):
BrokenPipeError: [Errno 32] Broken pipe
"""


@pytest.mark.parametrize(
    ("said", "starts", "lacks"),
    [
        (COMPILER, "RuntimeError: Failed to find C compiler", "Traceback"),
        (MEMORY, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 GiB.", "BrokenPipe"),
        ("warned: of something\nerror: no shape is called x\n", "error: no shape is called x", "warned"),
        ("Traceback (most recent call last):\n  line\nKeyboardInterrupt\n", "KeyboardInterrupt", "Traceback"),
        ("one\n\ntwo\nthree\nfour\n", "two / three / four", "one"),
        ("", "no message", "/"),
    ],
)
def test_a_message_starts_at_the_exception_and_includes_the_lines_after_it(
    said: str, starts: str, lacks: str
) -> None:
    message = workers.last_message(said)
    assert message.startswith(starts)
    assert lacks not in message
    assert "\n" not in message
    assert len(message) <= workers.MESSAGE_CHARACTERS


def test_a_compiler_s_advice_follows_the_error() -> None:
    assert "/ Set TORCHDYNAMO_VERBOSE=1" in workers.last_message(COMPILER)


# --- environment


def test_compiled_kernels_are_cached_for_later_workers_unless_the_environment_disables_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switches = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")
    for name in (*switches, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for case in ("plain", "B"):
        env = workers.worker_env(workers.heap_of(case))
        assert [env[name] for name in switches] == ["1", "1"]
    assert "GLIBC_TUNABLES" not in workers.worker_env(workers.heap_of("plain"))
    assert workers.worker_env(workers.heap_of("B"))["GLIBC_TUNABLES"] == KEEP_HEAP
    monkeypatch.setenv(switches[0], "0")
    assert workers.worker_env(KEEP_HEAP)[switches[0]] == "0"
