"""The process of a tracker with fake wandb modules. tests/faults has the failures that must not affect a run."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime import run_record
from runtime.settings import TrackingConfig
from study import trackers
from study.trackers import followed_by_trackers
from tests.checked_files import write_checked
from tests.small_runs import configuration, planned

GOOD = """
import json, os
def _write(*what):
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps(what) + "\\n")
def init(**options): _write("init", *(options[key] for key in ("project", "name", "mode", "group", "config")))
def log(values, step): _write("log", values, step)
def finish(exit_code=0): _write("finish", exit_code)
class run:
    class summary:
        update = staticmethod(lambda values: _write("summary", values))
"""
FAKES = {
    "good": GOOD,
    "helper": """
import subprocess, sys, time, os
def init(**options):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["SEEN"], "w").write(str(helper.pid))
    time.sleep(600)
""",
}


OFFLINE = TrackingConfig(True, "offline", "my-project")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "study" / "runs" / "B0"
    folder.mkdir(parents=True)
    lines = [
        {"event": "train", "iteration": k, "tokens": 8 * k, "loss": 9.0 - k, "train_seconds": 1.0}
        for k in (1, 2)
    ] + [{"event": "validation", "iteration": 2, "tokens": 16, "loss": 7.5, "perplexity": 1808.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_checked(folder / "run.json", run_record.blank("B0", "B", 0).to_json() | {"status": "finished"})
    planned(folder, replace(configuration(tmp_path, 1), tracking=OFFLINE), "B")
    return folder


@pytest.fixture
def fake(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Install a fake wandb; the file of what it saw."""

    def install(kind: str) -> Path:
        (run_dir / "fakes").mkdir()
        (run_dir / "fakes" / "wandb.py").write_text(FAKES[kind])
        monkeypatch.setenv("PYTHONPATH", str(run_dir / "fakes"))
        monkeypatch.setenv("SEEN", str(run_dir / "seen"))
        return run_dir / "seen"

    return install


def test_a_failed_run_is_logged_as_failed(run_dir: Path, fake: Callable[[str], Path]) -> None:
    write_checked(run_dir / "run.json", run_record.blank("B0", "B", 0).to_json() | {"status": "failed"})
    seen = fake("good")
    with followed_by_trackers(run_dir, OFFLINE):
        pass
    calls = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [call[0] for call in calls] == ["init", "log", "log", "log", "finish"]
    assert calls[-1] == ["finish", 1]


def wait_for(condition: Callable[[], bool]) -> None:
    """Fails after two minutes rather than never."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not come to pass in two minutes")


def gone(pid: int) -> bool:
    """Whether no process has this id, or only a dead one that its new parent has yet to reap."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("interrupted", [False, True])
def test_processes_of_a_tracker_end_with_it(
    run_dir: Path, fake: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.1)
    seen = fake("helper")
    with contextlib.suppress(KeyboardInterrupt), followed_by_trackers(run_dir, OFFLINE):
        wait_for(lambda: seen.exists() and bool(seen.read_text()))
        if interrupted:
            raise KeyboardInterrupt
    wait_for(lambda: gone(int(seen.read_text())))
