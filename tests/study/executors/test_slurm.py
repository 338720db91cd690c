"""Slurm through stand-ins for its commands. tests/faults has the real one."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from runtime import files, records
from runtime.batch_plan import BatchPlan
from runtime.dotconfig import read_symbols
from runtime.errors import UserError
from runtime.metrics_log import MetricsLine
from runtime.records import to_plain
from runtime.resolved_target import resolve, target_record
from runtime.run_record import RecordedTarget
from study import plan_file
from study.executors import slurm_executor as slurm
from study.executors.child_process import EXIT_INTERRUPTED
from study.executors.executor import (
    Ended,
    Message,
    Notice,
    Started,
    Task,
    TaskProgress,
    read_exit,
    write_exit,
)
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
    return SlurmExecutor(folder / "study", slots, "--partition=gpu", 2, lambda: clock.now, clock.sleep)


def a_task(folder: Path, name: str) -> Task:
    (folder / name).mkdir(exist_ok=True)
    return Task(folder / name / "plan.json", folder / "log")


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
    for option in ("--array=0-2%2", "--requeue", "--signal=B:USR1@120", "--partition=gpu", "--gpus=2"):
        assert option in command.split()
    set_state(cluster, "RUNNING", 1)
    line = {"event": "train", "iteration": 7, "loss": 4.5}
    (tmp_path / "B1" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    first, second = poll(built, 16.0)[:2]
    assert first == Started("B1", "1_1 on node1")
    assert second == TaskProgress("B1", MetricsLine("train", iteration=7, loss=4.5))
    (tmp_path / "log").write_text("words\n")
    write_exit(tmp_path / "B1", 5, {"peak_bytes": 3})
    assert not [message for message in poll(built) if isinstance(message, Ended)]  # still in the queue
    set_state(cluster, None, 1)
    assert poll(built) == [Ended("B1", 5, "words", {"peak_bytes": 3})]
    assert "2 jobs continue in Slurm" in built.close()


def test_a_job_that_is_gone_without_an_exit_file_was_lost(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    built = executor(tmp_path, clock)
    (tmp_path / "B0").mkdir()
    write_exit(tmp_path / "B0", 0)  # of an earlier process
    built.submit(a_task(tmp_path, "B0"))
    poll(built, 1.0)
    set_state(cluster, None, 0)
    assert poll(built, slurm.GRACE_SECONDS - 2) == []
    assert poll(built, 40.0)[-1] == Ended("B0", None)


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
    write_exit(tmp_path / "B0", 0)
    set_state(cluster, None, 0)
    second.submit(a_task(tmp_path, "B0"))
    assert poll(second)[-1] == Ended("B0", 0)
    assert len(calls(cluster, "sbatch")) == 1


def test_a_waiting_job_is_cancelled_and_a_running_one_may_save(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    built = executor(tmp_path, clock)
    for name in ("B0", "B1"):
        built.submit(a_task(tmp_path, name))
    poll(built)
    set_state(cluster, "RUNNING", 1)
    built.stop(["B0", "B1"])
    assert calls(cluster, "scancel") == ["scancel --batch --signal=TERM 1_1", "scancel 1_0"]


def test_a_refusal_of_the_first_array_is_an_error(cluster: Path, clock: Clock, tmp_path: Path) -> None:
    built = executor(tmp_path, clock)
    (cluster / "sbatch.fails").touch()
    for name in ("B0", "B1", "B2"):
        built.submit(a_task(tmp_path, name))
    with pytest.raises(UserError, match=r"sbatch: error: no; fix: CONFIG_SLURM_OPTIONS"):
        built.poll(1.0)
    assert not list((tmp_path / "study" / "slurm").glob("*.tasks"))
    (cluster / "squeue.fails").touch()
    with pytest.raises(UserError, match="squeue failed"):
        executor(tmp_path, clock).submit(a_task(tmp_path, "B0"))


def test_tasks_that_a_limit_refuses_wait_and_cancel_nothing(
    cluster: Path, clock: Clock, tmp_path: Path
) -> None:
    built = executor(tmp_path, clock)
    built.submit(a_task(tmp_path, "B0"))
    poll(built)
    set_state(cluster, "RUNNING", 0)
    (cluster / "sbatch.fails").touch()
    for name in ("B1", "B2"):
        built.submit(a_task(tmp_path, name))
    notices = [message for message in poll(built, 200.0) if isinstance(message, Notice)]
    assert ["2 tasks are submitted later" in notice.text for notice in notices] == [True]
    (cluster / "sbatch.fails").unlink()
    assert not calls(cluster, "scancel")
    poll(built, 60.0)
    assert len(fake_slurm.read(cluster)) == 3  # all three are in the queue


@pytest.mark.parametrize(
    ("options", "minutes"),
    [
        ("--time=2", 2), ("-t 90", 90), ("--time 1:30", 1.5), ("-t04:00:00", 240), ("--time=1-2", 1560),
        ("--time=UNLIMITED", None), ("--gres=gpu:1", None), ("", None),
    ],
)  # fmt: skip
def test_the_time_limit_is_read_as_sbatch_reads_it(options: str, minutes: float | None) -> None:
    assert slurm.time_limit_minutes(options) == minutes


def test_without_slurm_the_fix_is_named(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="squeue failed; fix: start `make` where"):
        executor(tmp_path, clock).submit(a_task(tmp_path, "B0"))


WORKER = """
import signal, sys, time
from pathlib import Path
def end(number, frame):
    print("saved", file=sys.stderr)
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
Path(sys.argv[1]).with_name("ready").touch()
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
    cluster: Path, tmp_path: Path, number: int, requeued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM, from scancel, ends it for good. The process ends before the shell looks whether it still runs."""
    place = with_worker(tmp_path, WORKER)
    late = {"BASH_FUNC_kill%%": '() { builtin kill "$@"; code=$?; [ $1 = -0 ] || sleep 0.5; return $code; }'}
    run = place.run_dir()
    run.mkdir(parents=True)
    monkeypatch.chdir(place.folder)
    built = SlurmExecutor(place.study)
    built.submit(Task(run / "plan.json", run / "log.txt"))
    built.poll(0.0)
    job = subprocess.Popen(
        ["bash", str(cluster / "1.sh")],
        cwd=place.folder,
        env=place.environment(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="0", SLURM_JOB_ID="9", **late),
    )
    wait_for((run / "ready").exists)
    os.kill(job.pid, number)
    assert job.wait(60) == EXIT_INTERRUPTED
    assert "saved" in (run / "log.txt").read_text()
    assert [line.startswith("scontrol requeue 9") for line in calls(cluster, "scontrol")] == [True] * requeued


def test_a_process_that_is_killed_on_its_node_says_how_it_ended(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = with_worker(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    run = place.run_dir()
    run.mkdir(parents=True)
    monkeypatch.chdir(place.folder)
    built = SlurmExecutor(place.study)
    built.submit(Task(run / "plan.json", run / "log.txt"))
    built.poll(0.0)
    ids = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "9"}
    subprocess.run(["bash", str(cluster / "1.sh")], cwd=place.folder, env=place.environment(**ids))
    assert read_exit(run)["status"] == -signal.SIGKILL


ON_NODE = """
import json, shutil, sys, time
from pathlib import Path
folder = Path(sys.argv[1]).parent
if Path(sys.argv[1]).name != "plan.json":
    answer = json.loads(Path("target.json").read_text())
    (folder / "exit.json").write_text(json.dumps({"status": 0, "answer": answer}))
else:
    with (folder / "processes").open("a") as processes:
        processes.write("x")
    while not Path("go").exists():
        time.sleep(0.02)
    shutil.copy(f"{folder.name}.json", folder / "run.json")
    (folder / "exit.json").write_text('{"status": 0, "answer": null}')
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
    first = SlurmExecutor(study.directory, 0, "", 0, lambda: clock.now, clock.sleep)
    for name in ("B0", "B1"):
        folder = place.run_dir(name)
        folder.mkdir(parents=True)
        first.submit(Task(folder / "plan.json", folder / "log.txt"))
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
