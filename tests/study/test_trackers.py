"""The logging process with fake wandb modules: no failure of it affects the caller."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime import run_record
from runtime.settings import TrackingConfig
from study.trackers import ExperimentLoggers, new_lines
from tests.checked_files import write_checked

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
    "refuses": "def init(**options): raise ConnectionError('refused')",
    "hangs": "import time\ndef init(**options): time.sleep(600)",
    "helper": """
import subprocess, sys, time, os
def init(**options):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["SEEN"], "w").write(str(helper.pid))
    time.sleep(600)
""",
    "dies": "import os\ndef init(**options): pass\ndef log(values, step): os._exit(7)",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "study" / "runs" / "B0"
    folder.mkdir(parents=True)
    lines = [
        {"event": "train", "iteration": k, "tokens": 8 * k, "loss": 9.0 - k, "train_seconds": 1.0}
        for k in (1, 2)
    ] + [{"event": "validation", "iteration": 2, "tokens": 16, "loss": 7.5, "perplexity": 1808.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config").write_text('# comment\nCONFIG_STUDY_NAME="study"\n')
    write_checked(folder / "run.json", run_record.blank("B0", "B", 0).to_json() | {"status": "finished"})
    return folder


def start(kind: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentLoggers:
    fakes = run_dir / "fakes"
    fakes.mkdir()
    (fakes / "wandb.py").write_text(FAKES[kind])
    monkeypatch.setenv("PYTHONPATH", str(fakes))
    monkeypatch.setenv("SEEN", str(run_dir / "seen"))
    return ExperimentLoggers(run_dir, TrackingConfig(True, "offline", "my-project"))


def test_a_failed_run_is_logged_as_failed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checked(run_dir / "run.json", run_record.blank("B0", "B", 0).to_json() | {"status": "failed"})
    start("good", run_dir, monkeypatch).finish(60)
    assert json.loads((run_dir / "seen").read_text().splitlines()[-1]) == ["finish", 1]


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
def test_processes_of_a_logger_end_with_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    trackers = start("helper", run_dir, monkeypatch)
    wait_for(lambda: (run_dir / "seen").exists() and bool((run_dir / "seen").read_text()))
    helper = int((run_dir / "seen").read_text())
    if interrupted:

        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(trackers.processes[0], "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trackers.finish(0.1)
    else:
        trackers.finish(0.1)
    wait_for(lambda: gone(helper))


PARENT = """
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
print(process.pid, flush=True)
time.sleep(600)
"""
HANGING = """
import os, subprocess, sys, time
from study.trackers import end_after_parent
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write(f"{helper.pid}.")  # before it is watched, after which it may end at any time
end_after_parent(int(sys.argv[1]) or os.getppid(), 0.1)
time.sleep(600)
"""


@pytest.mark.parametrize("dead_before", [False, True])
def test_a_hanging_logger_and_its_processes_end_soon_after_the_parent(
    tmp_path: Path, dead_before: bool
) -> None:
    """dead_before: the watched parent ended before the first check."""
    found = tmp_path / "seen"
    watched = str(2**22 + 1) if dead_before else "0"  # no Linux has a process of that number
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, HANGING, watched, str(found)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    hanging = int(parent.stdout.readline())
    wait_for(lambda: found.exists() and found.read_text().endswith("."))
    helper = int(found.read_text().rstrip("."))
    if not dead_before:
        assert not gone(hanging)
        parent.kill()
    wait_for(lambda: gone(hanging) and gone(helper))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()


@pytest.mark.parametrize("kind", ["refuses", "hangs", "dies"])
def test_a_failing_logger_is_ended_and_leaves_no_process(
    kind: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = start(kind, run_dir, monkeypatch)
    trackers.finish(1.0 if kind == "hangs" else 60.0)
    (process,) = trackers.processes
    assert process.returncode not in (None, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_only_complete_lines_are_read_and_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    lines, offset = new_lines(path, 0)
    assert lines == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert new_lines(path, offset)[0] == [{"a": 2}]
    path.write_text('{"b": 1}\n')
    assert new_lines(path, 18)[0] == [{"b": 1}]
