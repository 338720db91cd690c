"""Slurm through stand-ins for its commands. tests/faults has the real one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import files, records
from runtime.batch_plan import BatchPlan
from runtime.dotconfig import read_symbols
from runtime.errors import UserError
from runtime.records import to_plain
from runtime.resolved_target import resolve, target_record
from runtime.run_record import RecordedTarget
from study import plan_file
from study.executors import slurm_executor as slurm
from study.executors.child_process import EXIT_INTERRUPTED, Event
from study.executors.executor import Ended, Message, Started, Task, TaskProgress, read_exit, write_exit
from study.executors.slurm_executor import SlurmExecutor
from study.plan_file import Plan, PlanBudget, PlanRow
from study.study import Study
from study.worker import refuse_another_card
from tests.faults.workplace import Workplace, wait_for
from tests.small_runs import configuration
from tests.study.executors import fake_slurm
from tests.study.sample_records import a_record


class Clock:
    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cluster"
    for name, value in fake_slurm.install(folder).items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def clock() -> Clock:
    return Clock()


def executor(folder: Path, clock: Clock, slots: int = 0) -> SlurmExecutor:
    return SlurmExecutor(folder / "study", slots, "--partition=gpu", lambda: clock.now, clock.sleep)


def a_task(folder: Path, name: str) -> Task:
    (folder / name).mkdir(exist_ok=True)
    return Task(name, ("study", "B", "0"), folder / name, folder / "log")


def poll(built: SlurmExecutor, seconds: float = 20.0) -> list[Message]:
    """All messages of the next seconds."""
    clock = built._clock
    end = clock() + seconds
    found: list[Message] = []
    while clock() < end:
        found += built.poll(1.0)
    return found


def calls(cluster: Path, name: str) -> list[str]:
    return [line for line in (cluster / "calls.txt").read_text().splitlines() if line.startswith(name)]


def set_state(cluster: Path, state: str | None, index: int) -> None:
    jobs = fake_slurm.read(cluster)
    for job in jobs:
        if job["index"] == index:
            job["state"] = state
    fake_slurm.write(cluster, [job for job in jobs if job["state"]])


def test_what_is_missing_is_one_array_and_each_task_is_followed(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    built = executor(tmp_path, clock, slots=2)
    for name in ("B0", "B1", "B2"):
        built.submit(a_task(tmp_path, name))
    assert poll(built) == []
    (command,) = calls(cluster, "sbatch")
    for option in ("--array=0-2%2", "--requeue", "--signal=B:USR1@120", "--partition=gpu"):
        assert option in command.split()
    set_state(cluster, "RUNNING", 1)
    line = {"event": "train", "iteration": 7, "loss": 4.5}
    (tmp_path / "B1" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    first, second = poll(built, 16.0)[:2]
    assert first == Started("B1", "1_1 on node1")
    assert second == TaskProgress("B1", Event("train", iteration=7, loss=4.5))
    write_exit(tmp_path / "B1", Ended("B1", 5, "words", "a note", {"peak_bytes": 3}))
    assert not [message for message in poll(built) if isinstance(message, Ended)]  # still in the queue
    set_state(cluster, None, 1)
    assert poll(built) == [Ended("B1", 5, "words", "a note", {"peak_bytes": 3})]
    assert "2 jobs continue in Slurm" in built.close()


def test_a_job_that_is_gone_without_an_exit_file_was_lost(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    built = executor(tmp_path, clock)
    (tmp_path / "B0").mkdir()
    write_exit(tmp_path / "B0", Ended("B0", 0))  # of an earlier process
    built.submit(a_task(tmp_path, "B0"))
    poll(built, 1.0)
    set_state(cluster, None, 0)
    assert poll(built, slurm.GRACE_SECONDS - 2) == []
    assert poll(built, 40.0) == [Started("B0"), Ended("B0", None)]


def test_nothing_is_lost_while_squeue_fails(cluster: Path, clock: Clock, tmp_path: Path) -> None:
    built = executor(tmp_path, clock)
    built.submit(a_task(tmp_path, "B0"))
    poll(built)
    (cluster / "squeue.fails").touch()
    assert poll(built, 120.0) == []
    (cluster / "squeue.fails").unlink()
    set_state(cluster, "RUNNING", 0)
    assert poll(built) == [Started("B0", "1_0 on node0")]


def test_a_later_driver_follows_the_jobs_of_a_killed_one(cluster: Path, clock: Clock, tmp_path: Path) -> None:
    first = executor(tmp_path, clock)
    for name in ("B0", "B1"):
        first.submit(a_task(tmp_path, name))
    poll(first)
    set_state(cluster, None, 0)
    second = executor(tmp_path, clock)
    for name in ("B0", "B1"):
        second.submit(a_task(tmp_path, name))
    poll(second)
    assert len(calls(cluster, "sbatch")) == 2
    assert "--array=0-0" in calls(cluster, "sbatch")[1]  # B0 only
    assert {job["array"] for job in fake_slurm.read(cluster)} == {1, 2}


def test_a_job_that_ends_while_a_later_driver_starts_is_not_repeated(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    """The later driver reads the queue first, then which runs are finished."""
    first = executor(tmp_path, clock)
    first.submit(a_task(tmp_path, "B0"))
    poll(first)
    second = executor(tmp_path, clock)
    write_exit(tmp_path / "B0", Ended("B0", 0))
    set_state(cluster, None, 0)
    second.submit(a_task(tmp_path, "B0"))
    assert poll(second) == [Started("B0"), Ended("B0", 0)]
    assert len(calls(cluster, "sbatch")) == 1


def test_a_waiting_job_is_cancelled_and_a_running_one_may_save(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    built = executor(tmp_path, clock)
    for name in ("B0", "B1"):
        built.submit(a_task(tmp_path, name))
    poll(built)
    set_state(cluster, "RUNNING", 1)
    built.stop("B0")
    built.stop("B1")
    assert calls(cluster, "scancel") == ["scancel 1_0", "scancel --batch --signal=TERM 1_1"]


def test_a_refused_array_is_an_error_with_the_words_of_slurm(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    built = executor(tmp_path, clock)
    (cluster / "sbatch.fails").touch()
    built.submit(a_task(tmp_path, "B0"))
    with pytest.raises(UserError, match=r"sbatch: error: no; fix: CONFIG_SLURM_OPTIONS"):
        built.poll(1.0)
    (cluster / "squeue.fails").touch()
    with pytest.raises(UserError, match="squeue failed"):
        executor(tmp_path, clock).submit(a_task(tmp_path, "B0"))


def test_without_slurm_the_fix_is_named(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue failed; fix: start `make` where"):
        executor(tmp_path, clock).submit(a_task(tmp_path, "B0"))


WORKER = """
import signal, sys, time
def end(number, frame):
    print("saved", file=sys.stderr)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
print('{"event": "train", "iteration": 1, "iterations": 9}', flush=True)
time.sleep(600)
"""


def with_worker(folder: Path, code: str, **changes: str) -> Workplace:
    """Return a configured study whose training process is this code."""
    place = Workplace(folder / "place", folder, **changes)
    (place.folder / "scripts").unlink()
    (place.folder / "scripts").mkdir()
    (place.folder / "scripts" / "train.py").write_text(code)
    return place


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_before_the_time_limit_a_run_saves_and_its_job_is_requeued(
    cluster: Path, tmp_path: Path, number: int, requeued: bool
) -> None:
    """SIGTERM, from scancel, ends it for good."""
    place = with_worker(tmp_path, WORKER)
    run = place.run_dir()
    tasks = [{"name": "B0", "arguments": ["plan.json"], "folder": str(run), "log": str(run / "log")}]
    process = subprocess.Popen(
        [sys.executable, "-m", "study.executors.executor", json.dumps(tasks), "0"],
        cwd=place.folder,
        env=place.environment(RA_PLACE="slurm 7_0"),
    )
    wait_for(lambda: process.poll() is not None or _ready(place))
    os.kill(process.pid, number)
    assert process.wait(60) == EXIT_INTERRUPTED
    end = read_exit(run, "B0")
    if requeued:
        assert calls(cluster, "scontrol") == ["scontrol requeue 7_0"]
        assert end is None
    else:
        assert not (cluster / "calls.txt").exists()
        assert end is not None
        assert (end.status, end.message) == (EXIT_INTERRUPTED, "saved")


def _ready(place: Workplace) -> bool:
    """Whether the worker handles SIGTERM."""
    for process, words in place._processes():
        if "scripts.train" in words:
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


ON_NODE = """
import json, shutil, sys, time
from pathlib import Path
if sys.argv[1] == "--answer":
    print(json.dumps({"event": "answer", "answer": json.loads(Path("target.json").read_text())}), flush=True)
else:
    folder = Path(sys.argv[1]).parent
    with (folder / "processes").open("a") as processes:
        processes.write("x")
    while not Path("go").exists():
        time.sleep(0.02)
    shutil.copy(f"{folder.name}.json", folder / "run.json")
"""


def test_a_study_whose_driver_is_killed_ends_with_one_submission(
    cluster: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are stand-ins. tests/faults kills a real driver, with a real Slurm."""
    place = with_worker(tmp_path, ON_NODE, EXECUTOR_SLURM="y", SEEDS="2")
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("FAKE_SLURM_RUN", "1")
    study = Study(read_symbols(Path(".config")), Path(".config").read_text())
    target = resolve(study.config.target)
    files.write_json(place.folder / "target.json", to_plain(target))
    for seed in (0, 1):
        records.write(place.folder / f"B{seed}.json", a_record("B", seed, 4.0))
    study.directory.mkdir(parents=True)
    assert study.resolved == target  # by a node
    first = SlurmExecutor(study.directory, 0, "", lambda: clock.now, clock.sleep)
    for name in ("B0", "B1"):
        folder = place.run_dir(name)
        folder.mkdir(parents=True)
        first.submit(Task(name, (str(folder / "plan.json"),), folder, folder / "log.txt"))
    first.poll(1.0)
    del first  # its driver is killed
    (place.folder / "go").touch()
    monkeypatch.setattr(study, "report", lambda: None)
    plan = Plan(
        batch=BatchPlan(4, 2, 2, 1, 16),
        budget=PlanBudget(0, 0, 40),
        variants={"B": PlanRow("standard", 40, 2560)},
    )
    study.execute_pending(plan_file.write(study.directory, plan))
    assert [place.status(name) for name in ("B0", "B1")] == ["finished"] * 2
    assert [(place.run_dir(name) / "processes").read_text() for name in ("B0", "B1")] == ["x"] * 2
    assert len(calls(cluster, "sbatch")) == 2  # of the device and of the runs
    assert not place.orphans()


def test_a_node_with_another_card_refuses_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve(configuration(tmp_path, 1).target)
    planned = RecordedTarget(**target_record(resolved) | {"device": "NVIDIA A100"})
    refuse_another_card(planned, resolved)  # on the user's own machine
    monkeypatch.setenv("RA_PLACE", "slurm 1_0")
    with pytest.raises(
        UserError, match="was planned on NVIDIA A100, float32: a study has one kind of card; fix"
    ):
        refuse_another_card(planned, resolved)
