"""The line of a run, and the estimate of the study's remaining time."""

import io

import pytest

from runtime.metrics_log import MetricsLine
from runtime.output import LiveLine
from study import terminal
from study.terminal import Estimate, Terminal


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    built = Clock()
    monkeypatch.setattr(terminal.time, "monotonic", lambda: built.now)
    return built


def train(iteration: int) -> MetricsLine:
    return MetricsLine(
        "train", iteration=iteration, loss=8.31, train_seconds=10.0, tokens_per_second=23456.0,
        memory_bytes=3 * 2**29,
    )  # fmt: skip


def lines_of(monkeypatch: pytest.MonkeyPatch, *events: MetricsLine, name: str = "RALEARN2") -> list[str]:
    """Return the texts of the live line after its start."""
    shown: list[str] = []
    monkeypatch.setattr(LiveLine, "update", lambda self, text, share, key: shown.append(text))
    built = Terminal(Estimate(11, 7200.0), 15, io.StringIO())
    built.begin(name, 5, 100)
    for event in events:
        built.update(name, event)
    return shown


def test_the_line_shows_the_most_important_first(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = lines_of(monkeypatch, MetricsLine("validation", perplexity=17457.78), train(30))
    assert line.split("  ") == [
        "[5/15] RALEARN2", " 30%", "loss 8.310", "study 21h 24m left", "val ppl 17458", "run 23s left",
        "23.5k tok/s", "1.5 GiB",
    ]  # fmt: skip


def test_without_a_terminal_lines_are_plain_and_rare(clock: Clock) -> None:
    stream = io.StringIO()
    built = Terminal(Estimate(1, None), 1, stream)
    built.begin("B0", 1, 100)
    for second in range(40):
        clock.now = float(second)
        built.update("B0", train(second + 1))
    built.update("B0", MetricsLine("note", message="a note"))
    built.end("B0", "perplexity 12.00")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("[1/1] B0   16%  loss 8.310")
    assert lines[2:] == ["[1/1] B0: a note", "[1/1] B0  perplexity 12.00"]


# -- estimates --------------------------------------------------------------------------------------------------


def test_nothing_is_estimated_without_a_measurement(clock: Clock) -> None:
    estimate = Estimate(4, None)
    estimate.begin()
    assert estimate.seconds_left() is None
    clock.now = 1.0
    estimate.seconds_left(0.001)
    assert estimate.seconds_left(0.01) is None
    clock.now = 10.0
    assert estimate.seconds_left(0.101) == pytest.approx(90 * 0.899 + 3 * 91, rel=0.01)


def test_a_restarted_run_is_not_counted_as_finished(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    built = Terminal(Estimate(3, 1000.0), 3)
    built.begin("B0", 1, 100)
    clock.now = 5.0
    built.pause("B0", "once more")
    built.begin("B0", 1, 100)
    assert built.estimate.seconds_left(name="B0") == 3000.0
    clock.now = 105.0
    built.end("B0", "done")
    built.estimate.begin()
    assert built.estimate.seconds_left() == pytest.approx(200.0)
    assert capsys.readouterr().out.splitlines() == ["[1/3] B0  once more", "[1/3] B0  done"]


def test_the_first_run_shows_what_it_takes_with_its_start_and_evaluation(clock: Clock) -> None:
    """A run needs 5 s to start, 40 s of steps, a tenth of that for its last evaluation, and 3 s for the report."""
    estimate = Estimate(25, 10.0, final=0.1)
    estimate.begin()
    assert estimate.seconds_left() == 250.0
    clock.now = 5.0
    estimate.seconds_left(0.001)
    clock.now = 25.0
    assert estimate.seconds_left(0.501) == pytest.approx(24 + 24 * 49, rel=0.01)
    clock.now = 49.0
    estimate.end()
    estimate.add(3.0)
    estimate.begin("next")
    assert estimate.seconds_left(name="next") == 24 * 52.0


def test_runs_at_once_share_the_remaining_work(clock: Clock) -> None:
    """Two slots, five runs of 100 s: the third to fifth run take their turns."""
    estimate = Estimate(5, 100.0, slots=2)
    estimate.begin("a")
    estimate.begin("b")
    estimate.seconds_left(1e-9, "b")
    assert estimate.seconds_left(1e-9, "a") == pytest.approx(500 / 2)
    clock.now = 50.0
    estimate.seconds_left(0.5, "a")
    assert estimate.seconds_left(0.5, "b") == pytest.approx((50 + 50 + 300) / 2)
    for name in ("a", "b"):
        clock.now = 100.0
        estimate.end(name)
    estimate.begin("c")
    assert estimate.seconds_left(0.0, "c") == pytest.approx(150)
    estimate.left = 1  # the last run alone: the other slot is idle
    assert estimate.seconds_left(0.0, "c") == pytest.approx(100)
