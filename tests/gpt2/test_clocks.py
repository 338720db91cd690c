import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2 import clocks
from gpt2.clocks import NAMES, UNEVEN_STEPS, Clocks, step_timer, unevenness

ROOT = Path(__file__).parents[2]


class Time:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1000)), max_size=40))
def test_every_second_is_on_exactly_one_clock(steps: list[tuple[str, int]]) -> None:
    time = Time()
    clocks = Clocks(now=time)
    expected = dict.fromkeys(NAMES, 0.0)
    for name, seconds in steps:
        clocks.switch(name)
        time.seconds += seconds
        expected[name] += seconds
    assert clocks.seconds() == expected
    assert sum(clocks.seconds().values()) == time.seconds


def test_a_block_is_charged_to_its_clock_and_the_previous_clock_continues() -> None:
    time = Time()
    clocks = Clocks(now=time)
    clocks.switch("train")
    time.seconds += 3
    with clocks.on("evaluate"):
        time.seconds += 100
        with clocks.on("data"):
            time.seconds += 7
    time.seconds += 2
    assert clocks.seconds() == {"train": 5, "compile": 0, "evaluate": 100, "checkpoint": 0, "data": 7}


def test_the_device_is_synchronized_before_the_clock_changes() -> None:
    time = Time()

    def synchronise() -> None:
        time.seconds += 10  # queued training work that ends only now

    clocks = Clocks(synchronise=synchronise, now=time)
    clocks.switch("train", synchronise=False)
    with clocks.on("evaluate", synchronise=False):
        time.seconds += 1
    clocks.switch("evaluate")
    assert clocks.read("train") == 10


@pytest.mark.parametrize(
    "seconds",
    [
        [0.2] * 95 + [9.0] * 5,  # a few slow ones: the first after a pause, a checkpoint's
        [0.2 + 0.001 * k for k in range(100)],
        [0.2] * 80 + [0.29] * 20,
        [0.2, 0.9] * (UNEVEN_STEPS // 2 - 1),  # too few for a note
        [],
    ],
)
def test_uniform_or_few_step_times_are_not_noted(seconds: list[float]) -> None:
    assert unevenness(seconds) is None


@given(st.lists(st.floats(0.01, 10.0), min_size=UNEVEN_STEPS, max_size=60), st.sampled_from([0.25, 8.0]))
def test_the_unit_of_time_and_the_order_of_steps_do_not_matter(seconds: list[float], unit: float) -> None:
    scaled = [unit * value for value in reversed(seconds)]
    assert (unevenness(seconds) is None) == (unevenness(scaled) is None)


def test_on_a_cpu_step_time_is_the_cpu_time_of_all_threads_over_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clocks.time, "process_time", lambda: 6.0)
    assert step_timer("cpu", 4).mark() == 1.5
    monkeypatch.setattr(clocks, "running_time", lambda: lambda: 2.5)
    assert step_timer("cpu", 4, ranks=2).mark() == 2.5


def test_a_stopped_process_counts_no_time() -> None:
    code = """
import time
from gpt2.clocks import RunningTime
clock, wall = RunningTime(tick=0.02, stopped=0.5), time.perf_counter
start = clock(), wall()
print("ready", flush=True)
input()
print(clock() - start[0], wall() - start[1])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.flush()
        counted, passed = map(float, process.stdout.readline().split())
    assert passed >= 1.4
    assert 0 < counted <= passed - 1.3
