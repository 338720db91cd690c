"""`make sync`: the trackers of .config or of the study, the lines and the exit status."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import link_project
from tests.fake_trackers import install
from tests.study.sample_records import a_study

TRACKED = (
    'CONFIG_WANDB=y\nCONFIG_WANDB_MODE="offline"\nCONFIG_WANDB_PROJECT="p"\n# CONFIG_TRACKIO is not set\n'
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    link_project(tmp_path)
    install(tmp_path / "fakes", monkeypatch)
    study = a_study(tmp_path / "results" / "week", seeds=1, variants=("B",))
    (study / "config").write_text(TRACKED)
    return tmp_path


def sync(place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.sync", "results/week"],
        cwd=place, capture_output=True, text=True, env=dict(os.environ, MAKEFLAGS=""),
    )  # fmt: skip


def test_each_run_has_a_line_and_a_second_call_sends_nothing(place: Path) -> None:
    done = sync(place)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["wandb", "B0", "sent:", "replayed", "from", "the", "records"],
        ["wandb", "verdict", "nothing", "to", "send:", "the", "report", "has", "no", "verdict"],
        ["1", "sent,", "1", "nothing", "to", "send"],
    ]
    assert sync(place).stdout.splitlines()[-1] == "1 already sent, 1 nothing to send"


def test_the_exit_status_is_1_if_a_tracker_refuses(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WANDB", "refuse")
    done = sync(place)
    assert done.returncode == 1
    assert "B0                   not sent: ConnectionError: 401: no such key" in done.stdout


def test_without_a_tracker_one_line_names_the_fix(place: Path) -> None:
    (place / "results/week/config").write_text("# CONFIG_WANDB is not set\n# CONFIG_TRACKIO is not set\n")
    done = sync(place)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no tracker is configured; fix: make menuconfig")
    assert done.stderr.count("\n") == 1
