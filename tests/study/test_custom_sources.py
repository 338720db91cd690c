"""All runs of a variant have one source, and the study saves it."""

import os
from pathlib import Path

import pytest

from ra import arms
from runtime.errors import UserError
from study.preconditions import snapshot_sources


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "ra-own"
    folder.mkdir()
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", folder)
    (folder / "mine.py").write_text("first idea\n")
    return folder / "mine.py"


def keep(tmp_path: Path, begun: bool) -> str:
    snapshot_sources(
        tmp_path / "study", ["B", "RAALL", "RA:0", "MINE"], lambda name: begun and name == "MINE"
    )
    (saved,) = (tmp_path / "study/own").iterdir()
    return saved.read_text()


def test_the_source_is_saved_and_may_change_until_a_run_has_started(tmp_path: Path, source: Path) -> None:
    assert keep(tmp_path, begun=False) == "first idea\n"
    source.write_text("a typo less\n")
    assert keep(tmp_path, begun=False) == "a typo less\n"
    assert keep(tmp_path, begun=True) == "a typo less\n"


def test_a_changed_source_of_a_started_run_is_refused_and_nothing_is_lost(
    tmp_path: Path, source: Path
) -> None:
    keep(tmp_path, begun=False)
    source.write_text("second idea\n")
    with pytest.raises(
        UserError,
        match=r"ra/custom/mine\.py differs from the source of existing runs of MINE .*fix: set another CONFIG",
    ):
        keep(tmp_path, begun=True)
    assert (tmp_path / "study/own/mine.py").read_text() == "first idea\n"
    source.write_text("first idea\n")
    assert keep(tmp_path, begun=True) == "first idea\n"


def test_the_file_whose_cost_is_matched_may_not_change_either(tmp_path: Path, source: Path) -> None:
    arm = "B+WIDTH=match:MINE"
    snapshot_sources(tmp_path / "study", ["B", arm], lambda name: False)
    source.write_text("second idea\n")
    with pytest.raises(UserError, match="differs from the source"):
        snapshot_sources(tmp_path / "study", ["B", arm], lambda name: name == arm)


def test_the_bytes_of_a_source_are_saved_whatever_its_encoding(tmp_path: Path, source: Path) -> None:
    content = b"# caf\xe9\n"
    source.write_bytes(content)
    for begun in (False, True):
        snapshot_sources(tmp_path / "study", ["MINE"], lambda name, begun=begun: begun)
    assert (tmp_path / "study/own/mine.py").read_bytes() == content


def test_a_fifo_as_source_or_as_its_copy_is_refused_without_blocking(tmp_path: Path, source: Path) -> None:
    keep(tmp_path, begun=False)
    (tmp_path / "study/own/mine.py").unlink()
    os.mkfifo(tmp_path / "study/own/mine.py")
    with pytest.raises(UserError, match="differs from the source"):
        snapshot_sources(tmp_path / "study", ["MINE"], lambda name: True)
    source.unlink()
    os.mkfifo(source)
    with pytest.raises(UserError, match=r"not a regular file; fix: restore ra/custom/mine\.py"):
        snapshot_sources(tmp_path / "study", ["MINE"], lambda name: False)
