import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.clock import NAMES, Clocks


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


def test_a_block_is_charged_to_its_clock_and_the_former_one_goes_on() -> None:
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


def test_the_device_is_waited_for_before_the_clock_changes_hands() -> None:
    time = Time()

    def synchronise() -> None:
        time.seconds += 10  # queued training work that ends only now

    clocks = Clocks(synchronise=synchronise, now=time)
    clocks.switch("train", synchronise=False)
    with clocks.on("evaluate", synchronise=False):
        time.seconds += 1
    clocks.switch("evaluate")
    assert clocks.read("train") == 10


def test_clocks_continue_where_a_former_process_stopped() -> None:
    time = Time()
    clocks = Clocks({"train": 41.5, "evaluate": 2.0}, now=time)
    clocks.switch("train")
    time.seconds += 1
    assert clocks.read("train") == 42.5
    assert clocks.read("evaluate") == 2.0


def test_an_unknown_clock_is_refused() -> None:
    with pytest.raises(KeyError, match="no clock 'lunch'"):
        Clocks().switch("lunch")
