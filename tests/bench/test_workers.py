"""Processes that measure: answers, last words, and an end for one that does not answer."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bench import workers as bench
from bench.cases import Shape

SHAPE = Shape("small", 2, 2, 16, 8, ())


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let processes run `code` instead of the bench."""
    monkeypatch.setattr(bench, "COMMAND", (sys.executable, "-c", code))


@pytest.mark.parametrize("case", ["plain", "RALEARN:hard", "RALEARN:hard:8"])
def test_a_case_is_measured_in_a_process(case: str) -> None:
    seen = bench.in_a_process(SHAPE, case, 4, 0.0)
    assert seen["tokens_per_second"] == pytest.approx(4 * 8 / seen["step_seconds"])
    assert seen["peak_bytes"] > 0


def test_held_processes_take_turns_step_by_step_and_end_with_the_bench() -> None:
    with bench.Held() as measure:
        for _ in range(3):
            for case in ("plain", "B"):
                assert measure(SHAPE, case, 4, 0.0)["step_seconds"] > 0
        processes = [running.process for running in measure._running.values()]
        assert len(processes) == 2
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() == 0 for process in processes)


def test_a_case_that_fails_in_its_process_gives_its_last_words() -> None:
    with pytest.raises(bench.BenchError, match=r"small, XB at micro-batch 4: .*XB"), bench.Held() as measure:
        measure(SHAPE, "XB", 4, 0.0)


def test_a_process_that_is_killed_is_told_of_by_its_signal_and_stray_lines_are_passed_over() -> None:
    with bench.Running(SHAPE, "B", 4) as running:
        assert running.steps(0.0)["step_seconds"] > 0
        running.process.kill()
        with pytest.raises(bench.BenchError, match="killed by SIGKILL"):
            running.steps(0.0)
        with pytest.raises(bench.BenchError, match="killed by SIGKILL"):  # at once, however often it is asked
            running.steps(0.0)
    with bench.Running(SHAPE, "B", 4) as running:
        running.process.stdout = iter(["said by a library\n", "[1]\n", '{"step_seconds": 1.0}\n'])  # type: ignore[assignment]
        assert running.steps(0.0) == {"step_seconds": 1.0}


# --- patience


def test_a_process_that_does_not_answer_is_ended_though_what_it_started_holds_its_output(
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
    monkeypatch.setattr(bench, "FIRST_ANSWER", 1.0)
    with bench.Running(SHAPE, "B", 4) as running:
        while not (compiler.exists() and compiler.read_text()):
            assert running.process.poll() is None
            time.sleep(0.05)
        try:
            with pytest.raises(
                bench.BenchError, match=r"B at micro-batch 4: no answer within 1 s, .*: compiling"
            ):
                running.steps(0.0)
            assert running.process.returncode == -signal.SIGKILL
            os.kill(int(compiler.read_text()), 0)  # still there, and with it the output's other end
        finally:
            os.kill(int(compiler.read_text()), signal.SIGKILL)


def test_patience_grows_with_the_seconds_asked_for_and_is_longest_before_the_first_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, "import sys\nfor line in sys.stdin: print('{}', flush=True)")
    waited: list[float] = []
    line = bench.Running._line

    def watched(running: bench.Running, seconds: float) -> str | None:
        waited.append(seconds)
        return line(running, seconds)

    monkeypatch.setattr(bench.Running, "_line", watched)
    with bench.Running(SHAPE, "B", 4) as running:
        for seconds in (0.0, 0.0, 12.0):
            assert running.steps(seconds) == {}
    later = bench.LATER_ANSWER
    assert waited == pytest.approx([bench.FIRST_ANSWER, later, later + 12 * bench.SLOWER], abs=1.0)


def test_a_process_that_does_not_end_when_it_is_asked_for_nothing_more_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(bench, "ENDING", 0.2)
    with bench.Running(SHAPE, "B", 4) as running:
        pass
    assert running.process.returncode == -signal.SIGKILL


# --- last words

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
def test_last_words_begin_at_the_exception_and_keep_what_is_said_behind_it(
    said: str, starts: str, lacks: str
) -> None:
    words = bench.last_words(said)
    assert words.startswith(starts)
    assert lacks not in words
    assert "\n" not in words
    assert len(words) <= bench.LETTERS


def test_a_compiler_s_advice_follows_what_went_wrong() -> None:
    assert "/ Set TORCHDYNAMO_VERBOSE=1" in bench.last_words(COMPILER)


# --- surroundings


def test_kernels_are_kept_from_process_to_process_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switches = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")
    for name in (*switches, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for case in ("plain", "B"):
        assert [bench.surroundings(case)[name] for name in switches] == ["1", "1"]
    assert "GLIBC_TUNABLES" not in bench.surroundings("plain")
    assert bench.surroundings("B")["GLIBC_TUNABLES"] == bench.KEEP_HEAP
    monkeypatch.setenv(switches[0], "0")
    assert bench.surroundings("B")[switches[0]] == "0"
