"""Test the progress of preparation: a live line on a terminal, plain lines otherwise."""

import io
import re
from pathlib import Path

import pytest

from gpt2.config.config import DataConfig
from gpt2.data import dataset, progress, sources
from gpt2.data.progress import TokenMeter

ESCAPE = "\x1b"


class Screen(io.StringIO):
    """A terminal that records its output."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the meter's clock."""
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


def test_without_a_terminal_plain_lines_are_printed_every_few_seconds(clock: list[float]) -> None:
    lines: list[str] = []
    stream = io.StringIO()
    with TokenMeter("data", lines.append, stream) as meter:
        for tokens in range(0, 13_000_000, 1_000_000):
            meter.update(tokens, 0.5)
            clock[0] += 1.0
    assert lines == ["data: 5.0M tokens, 1.00M tokens/s", "data: 10.0M tokens, 1.00M tokens/s"]
    assert stream.getvalue() == ""


def test_on_a_terminal_the_live_line_shows_bar_and_rate_and_is_erased_at_the_end() -> None:
    lines: list[str] = []
    screen = Screen()
    with TokenMeter("data", lines.append, screen) as meter:
        meter.update(3_000_000, 0.25)
        assert meter._live
        meter._live.refresh()
    assert lines == []
    shown = next(line for line in visible(screen.getvalue()) if "25%" in line)
    assert re.search(r"^data ━+[╸╺]?━* +25% 3\.0M tokens, [0-9.]+M tokens/s", shown), shown
    assert screen.getvalue().rstrip().endswith(f"{ESCAPE}[2K")  # erased


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_the_live_line_never_wraps(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Screen()
    with TokenMeter("data", print, screen) as meter:
        for share in (None, 0.1, 1.0, 1.3):  # a limit of tokens may be passed by a part of a batch
            meter.update(123_456_789_012, share)
            assert meter._live
            meter._live.refresh()
    assert all(len(line) <= columns for line in visible(screen.getvalue()))


def test_an_unknown_share_is_shown_without_a_percentage() -> None:
    screen = Screen()
    with TokenMeter("data", print, screen) as meter:
        meter.update(3_000_000, None)
        assert meter._live
        meter._live.refresh()
    assert "%" not in "".join(visible(screen.getvalue()))


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    lines: list[str] = []
    screen = Screen()
    with TokenMeter("data", lines.append, screen) as meter:
        clock[0] += 6.0
        meter.update(6_000_000, None)
    assert lines == ["data: 6.0M tokens, 1.00M tokens/s"]
    assert screen.getvalue() == ""


def settings(folder: Path, count: int, max_tokens: int = 0) -> DataConfig:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"Text {number}. " * (number + 3))
    return DataConfig("files", (str(folder / "*.txt"),), max_tokens, folder / "prepared", 1)


@pytest.mark.parametrize("max_tokens", [0, 2000])
def test_the_finished_share_grows_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    shares: list[float | None] = []
    monkeypatch.setattr(dataset.TokenMeter, "update", lambda self, tokens, share: shares.append(share))
    monkeypatch.setattr(dataset, "batches", lambda texts: ([text] for text in texts))
    dataset.prepare(settings(tmp_path / "texts", 60, max_tokens), report=lambda text: None)
    known = [share for share in shares if share is not None]
    assert len(known) == len(shares) > 10
    assert known == sorted(known)
    assert known[-1] >= 1.0 > known[-2]


@pytest.mark.parametrize("count", [sources.FEW_FILES - 1, sources.FEW_FILES, 50])
def test_documents_are_counted_before_preparation_from_a_minimum_of_files_on(
    tmp_path: Path, count: int
) -> None:
    config = settings(tmp_path / "texts", count)
    expected = sources.document_count(config)
    assert expected in (None, len(list(sources.documents(config))))
    assert (expected is None) == (count < sources.FEW_FILES)


def test_documents_of_the_embedded_text_are_counted_by_its_files() -> None:
    config = DataConfig("embedded", (), 0, Path("nowhere"), 1)
    assert sources.document_count(config) == len(sources.embedded_files())
    assert sources.document_count(DataConfig("tinystories", (), 0, Path("nowhere"), 1)) is None
