"""The live line never wraps, plain lines carry no control characters, and what is estimated has a reason."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from study.runner import terminal
from study.runner.child_process import Event
from study.runner.terminal import Estimate, LiveLine, Terminal, fitting, wrapped


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal.time, "monotonic", lambda: made.now)
    return made


def train(iteration: int) -> Event:
    return Event(
        "train", iteration=iteration, iterations=100, loss=8.31, train_seconds=10.0, tokens_per_second=23456.0,
        memory_bytes=3 * 2**29,
    )  # fmt: skip


def rendered(line: LiveLine, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(line)
    return capture.get().removesuffix("\n")


def told_at(width: int, name: str = "RALEARN2") -> str:
    made = Terminal(Estimate(11, 7200.0), 15, io.StringIO())
    made.begin(name, 5)
    made.update(Event("validation", perplexity=17457.78))
    made.update(train(30))
    return rendered(made._line, width)


@pytest.mark.parametrize("width", range(10, 200, 7))
def test_the_live_line_is_one_line_and_narrower_than_the_terminal(width: int) -> None:
    line = told_at(width, "RA:0-3,5,7-9,11" * 3)
    assert "\n" not in line
    assert len(line) < width


def test_a_wide_terminal_shows_everything_and_a_bar() -> None:
    line = told_at(140)
    for piece in ("[5/15] RALEARN2", "━━━", " 30%", "loss 8.310", "val ppl 17458", "23.5k tok/s", "1.5 GiB"):
        assert piece in line
    assert "run 23s left" in line
    assert "study 21h 24m left" in line


def test_an_evaluation_takes_no_number_from_the_line() -> None:
    made = Terminal(Estimate(1, 60.0), 1, io.StringIO())
    made.begin("B0", 1)
    made.update(train(30))
    training = rendered(made._line, 120)
    made.update(Event("phase", phase="validating"))
    phase = rendered(made._line, 120)
    assert "validating" in phase
    assert phase.partition("run ")[0].startswith(training.partition("  run ")[0])


def test_eighty_columns_show_name_progress_and_time_left() -> None:
    line = told_at(80)
    for piece in ("[5/15] RALEARN2", " 30%", "loss 8.310", "study 21h 24m left"):
        assert piece in line
    assert "GiB" not in line


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1), st.integers(1, 90))
def test_parts_are_dropped_by_importance_and_the_rest_is_in_order(
    drawn: list[tuple[int, int]], width: int
) -> None:
    parts = [(str(rank) * length, rank) for rank, length in drawn]  # a text tells its rank
    kept = fitting(parts, width)
    assert len("  ".join(kept)) <= width
    texts = iter(text[:width] for text, _ in parts)
    assert all(text in texts for text in kept)  # a subsequence
    assert sorted(int(text[0]) for text in kept) == sorted(rank for _, rank in parts)[: len(kept)]


@given(st.text("ab -:\n", max_size=200), st.integers(20, 90))
def test_wrapping_changes_nothing_but_white_space(text: str, width: int) -> None:
    lines = wrapped(text, width).split("\n")
    assert " ".join(lines).split() == text.split()
    own = set(text.split("\n"))
    assert all(len(line) <= width or line in own or " " not in line.strip() for line in lines)


def test_a_command_is_not_wrapped() -> None:
    command = (
        "  .venv/bin/python -m wandb sync results/a-study-with-a-long-name/runs/RALEARN0/wandb/offline-run-2"
    )
    assert wrapped(f"to send it:\n{command}", 40).splitlines() == ["to send it:", command]


def test_without_a_terminal_lines_are_plain_complete_and_infrequent(clock: Clock) -> None:
    stream = io.StringIO()
    made = Terminal(Estimate(1, None), 1, stream)
    made.say("a note of more than eighty columns: " + "word " * 30)
    made.begin("B0", 1)
    for second in range(40):
        clock.now = float(second)
        made.update(train(second + 1))
    made.end("perplexity 12.00")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()
    assert lines[1].startswith("[1/1] B0   16%  loss 8.310")
    assert lines[-1] == "[1/1] B0  perplexity 12.00"


def test_a_terminal_without_cursor_control_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    stream = Dumb()
    made = Terminal(Estimate(1, None), 1, stream)
    made.begin("B0", 1)
    made.update(train(1))
    made.end("done")
    assert stream.getvalue() == "[1/1] B0  done\n"


# -- estimates --------------------------------------------------------------------------------------------------


def test_nothing_is_estimated_without_a_measurement(clock: Clock) -> None:
    estimate = Estimate(4, None)
    estimate.begin()
    assert estimate.seconds_left() is None
    clock.now = 1.0
    estimate.seconds_left(0.001)
    assert estimate.seconds_left(0.01) is None
    clock.now = 10.0
    assert estimate.seconds_left(0.101) == pytest.approx(100 * 0.899 + 3 * 100)


def test_a_resumed_run_is_not_counted_as_a_fast_one(clock: Clock) -> None:
    estimate = Estimate(1, None)
    estimate.begin()
    estimate.seconds_left(0.8)
    clock.now = 10.0
    assert estimate.seconds_left(0.9) == pytest.approx(10.0)


def test_a_restarted_run_is_not_counted_as_finished(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    made = Terminal(Estimate(3, 1000.0), 3)
    made.begin("B0", 1)
    clock.now = 5.0
    made.pause("once more")
    made.begin("B0", 1)
    assert made.estimate.seconds_left() == 3000.0
    clock.now = 105.0
    made.end("done")
    made.estimate.begin()
    assert made.estimate.seconds_left() == pytest.approx(200.0)
    assert capsys.readouterr().out.splitlines() == ["[1/3] B0  once more", "[1/3] B0  done"]


def test_measured_run_times_replace_planned_ones(clock: Clock) -> None:
    estimate = Estimate(3, 1000.0)
    estimate.begin()
    assert estimate.seconds_left() == 3000.0
    clock.now = 100.0
    estimate.end()
    estimate.begin()
    assert estimate.seconds_left() == pytest.approx(200.0)
    estimate.seconds_left(0.01)
    clock.now = 300.0  # twice as slow as the first one
    assert estimate.seconds_left(0.51) == pytest.approx(400 * 0.49 + 100)
