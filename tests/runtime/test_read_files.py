"""The reader of files: what it returns, and the reason of every refusal."""

import os
import signal
import socket
from pathlib import Path

import pytest

from runtime.files import DamagedFileError, read_json, read_text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ('{"a": 1', "not valid JSON"),
        ("[NaN]", "the number NaN is out of range"),
        ("[1e309]", "the number 1e309 is out of range"),
        ('["\\ud800"]', "surrogates not allowed"),
        ('{"\\udcff": 1}', "surrogates not allowed"),
        ('{"a":' * 1_000_000, "nested too deeply"),
    ],
)
def test_invalid_json_is_refused_with_the_file_and_the_reason(tmp_path, text, reason):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DamagedFileError) as caught:
        read_json(tmp_path / "a.json")
    assert str(caught.value).startswith(f"{tmp_path / 'a.json'} ")
    assert reason in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_byte_outside_utf_8_is_named_with_its_place(tmp_path):
    (tmp_path / "config").write_bytes(b"CONFIG_A=y\n\x80")
    with pytest.raises(DamagedFileError, match="config cannot be read: not UTF-8 text at byte 11"):
        read_text(tmp_path / "config")


def test_a_file_above_the_limit_is_refused_and_not_read_in_full(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)  # a sparse file
    with pytest.raises(DamagedFileError, match="larger than 10 bytes"):
        read_text(tmp_path / "large", 10)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path.relative_to(Path.cwd())))


@pytest.mark.parametrize("make", [fifo, link_to_zero, unix_socket, Path.mkdir])
def test_only_regular_files_are_read_and_none_blocks(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run.json")
    signal.alarm(60)  # a reader that blocks ends the test
    try:
        with pytest.raises(DamagedFileError, match=r"run\.json cannot be read: "):
            read_text(tmp_path / "run.json")
    finally:
        signal.alarm(0)
