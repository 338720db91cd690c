"""The live line never wraps and is erased; elsewhere lines are plain, whole and rare."""

import io
import re

import pytest

from runtime import output as progress
from runtime.output import LiveLine

HOSTILE = "B0 \x1b]0;title\x07\x9b31m\u202e\ud800\r"


class Screen(io.StringIO):
    """A terminal that records its output."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def visible(written: str) -> list[str]:
    """Return the states of the line in order, without control sequences."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()]


def shown(text: str, share: float | None) -> str:
    """What a terminal receives until the line ends."""
    screen = Screen()
    with LiveLine(stream=screen) as line:
        line.update(text, share)
        assert line._progress
        line._progress.refresh()
    return screen.getvalue()


@pytest.mark.parametrize("columns", [5, 20, 40, 79, 80, 81, 200])
@pytest.mark.parametrize("share", [None, 0.3, 1.0])
def test_the_live_line_is_one_line_and_narrower_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, share: float | None
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = "[5/15] RA-0-3_5_7-9_11.2   30%  loss 8.310  " * 5
    written = shown(text, share)
    assert all(len(line.rstrip("\r\n")) < columns for line in visible(written))
    state = visible(written)[-1].strip()
    assert text.startswith(state if columns < progress.WIDE else state.lstrip("━╸╺ "))


def test_without_a_terminal_lines_are_plain_whole_and_rare(clock: list[float]) -> None:
    stream = io.StringIO()
    line = LiveLine(5.0, stream=stream)
    line.say("a note of more than eighty columns: " + "word " * 30)
    with line:
        for second in range(13):
            line.update(f"second {second}", 0.5)
            clock[0] += 1.0
    assert (
        stream.getvalue() == "a note of more than eighty columns: " + "word " * 30 + "\nsecond 5\nsecond 10\n"
    )


def test_control_sequences_of_a_hostile_text_are_not_sent() -> None:
    screen = Screen()
    with LiveLine(stream=screen) as line:
        line.update(HOSTILE, 0.5)
        assert line._progress
        line._progress.refresh()
        line.say(HOSTILE)
    written = re.sub(r"\x1b\[(\?25[lh]|[0-9;]*m|2K|1A)", "", screen.getvalue())
    assert "\\x1b]0;title\\x07\\x9b31m\\u202e\\ud800\\r" in written
    assert not set(written) & set("\x1b\x07\x9b\u202e\ud800")
