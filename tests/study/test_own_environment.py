"""A training process has the settings of its study, and obeys a request to stop from its start on."""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from gpt2.training_step import StepResult
from runtime import run_record
from runtime.ranks import free_port
from runtime.settings import load_config
from runtime.signals import Interrupted, Stop
from study.study import Study
from tests import small_runs
from tests.faults.workplace import Workplace, wait_for
from tests.small_runs import StopAfter, same


def torchrun(port: int) -> dict[str, str]:
    """Return the variables of the first of two processes."""
    return {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.mark.slow
def test_a_study_trains_alone_in_a_shell_of_another_launcher(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "admit", lambda study: None)
    place = Workplace(tmp_path, texts, GPT2_MAX_ITERS="4", CPU_THREADS="2")
    foreign = torchrun(free_port()) | {"SLURM_PROCID": "1", "OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}
    done = place.here("scripts.study", **foreign)
    assert done.returncode == 0, done.stdout
    environment = place.record()["environment"]
    assert environment["threads"] == 2
    assert not foreign.keys() & environment["variables"].keys()


@pytest.mark.slow
def test_a_process_that_waits_for_other_ranks_obeys_a_request_to_stop(tmp_path: Path, texts: Path) -> None:
    place = Workplace(tmp_path, texts, GPT2_MAX_ITERS="4", RANKS="2")
    port = free_port()
    small_runs.planned(place.run_dir(), load_config(place.folder / ".config"), "B")
    process = place.start("scripts.train", str(place.run_dir() / "plan.json"), **torchrun(port))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0 or process.poll() is not None

    wait_for(listens)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 3, output
    assert not list(place.study.glob("runs/*/checkpoint/*"))


def test_a_stop_before_the_first_step_keeps_the_last_checkpoint(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_runs.configuration(texts, 6)
    assert small_runs.start(tmp_path / "whole", config).train() == "finished"
    assert small_runs.start(tmp_path / "parts", config, stop=StopAfter(4)).train() == "interrupted"
    saved = {
        path: path.read_bytes() for path in (tmp_path / "parts").rglob("*/checkpoint/**/*") if path.is_file()
    }
    stop = Stop()
    stop.at_once = True
    run = small_runs.start(tmp_path / "parts", config, stop=stop)

    def step(*arguments: object) -> StepResult:
        stop._note(signal.SIGTERM, None)
        raise AssertionError("the step went on")

    monkeypatch.setattr(run.stepper, "step", step)
    with pytest.raises(Interrupted):
        run.train()
    assert run_record.load(tmp_path / "parts").status == "interrupted"
    assert {path: path.read_bytes() for path in saved} == saved
    assert small_runs.start(tmp_path / "parts", config).train() == "finished"
    assert same(small_runs.outcome(tmp_path / "whole"), small_runs.outcome(tmp_path / "parts"))


def test_a_run_that_resumes_with_other_threads_notes_it(
    tmp_path: Path, texts: Path, one_thread: None
) -> None:
    config = small_runs.configuration(texts, 4)
    assert small_runs.start(tmp_path, config, stop=StopAfter(3)).train() == "interrupted"
    torch.set_num_threads(2)
    assert small_runs.start(tmp_path, config).train() == "finished"
    assert any("with 2 threads, before with 1" in note for note in run_record.load(tmp_path).notes)
