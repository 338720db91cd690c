"""Studies of `make card`: a stop, too little memory, and the verdicts on their records."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.card import disturbed_train, studies
from bench.card.checks import CheckedDevice, NotRunError
from bench.card.disturbed_train import VARIABLE, Disturbance
from gpt2.config.config import ANY_TARGET
from gpt2.hardware.resolve import resolve
from gpt2.train.step import Stepper
from study.runner import worker
from tests.shared_folder import data_folder

SMALL = {
    "VARIANTS": "B",
    "GPT2_MAX_ITERS": "4",
    "GPT2_BLOCK_SIZE": "16",
    "EFFECTIVE_BATCH": "2",
    "EVAL_TOKENS": "64",
    "DATASET_MAX_TOKENS": "20000",
}


@pytest.fixture
def card(tmp_path: Path) -> CheckedDevice:
    return CheckedDevice(resolve(ANY_TARGET), tmp_path)


def test_a_study_is_stopped_by_its_training_process(
    card: CheckedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")  # restored after the test
    values = studies.COMMON | SMALL | data_folder()
    arguments = (card.folder / studies.STOPPED, studies.SPECIFICATIONS[True], values, Disturbance(stop_at=2))
    assert studies.start_study(*arguments, starts=1) == [130]
    with pytest.raises(NotRunError, match="the stopped run of B is interrupted: no error"):
        studies.losses(card, studies.STOPPED, "B")


def test_a_study_without_a_record_is_not_run(card: CheckedDevice) -> None:
    with pytest.raises(NotRunError, match="the undisturbed run of B has no record"):
        studies.finished(card, studies.UNDISTURBED, "B")
    with pytest.raises(NotRunError, match="the budget study has no plan"):
        studies.read_plan(card, studies.TIMED)


@pytest.mark.parametrize(
    ("resumed", "limit", "verdict", "measured"),
    [
        ([3.0, 2.0], 0.0, "pass", "equal to the bit"),
        ([3.0, 2.5], 0.0, "differs", "largest difference 5.0e-01 nats; equal to the bit before step 2"),
        ([3.0, 2.5], 0.6, "pass", "largest difference 5.0e-01 nats; equal to the bit before step 2"),
        ([3.0], 0.6, "differs", "2 and 1 losses"),
    ],
)
def test_losses_are_compared(
    card: CheckedDevice,
    monkeypatch: pytest.MonkeyPatch,
    resumed: list[float],
    limit: float,
    verdict: str,
    measured: str,
) -> None:
    found = {studies.UNDISTURBED: [3.0, 2.0], studies.STOPPED: resumed}
    monkeypatch.setattr(studies, "STEPS", 2)
    monkeypatch.setattr(studies, "losses", lambda card, label, name: found[label])
    line = studies.compare_losses(card, "losses", studies.STOPPED, "B", limit)
    assert (line.verdict, line.measured) == (verdict, measured)


def train(monkeypatch: pytest.MonkeyPatch, disturbance: Disturbance, micro: int = 4) -> list[Any]:
    """Run eight steps in a disturbed process that is replaced by this one. Returns what happened."""
    happened: list[Any] = []

    class Batch:
        def __init__(self) -> None:
            self.micro = micro

    class FakeStepper:
        batch = Batch()

    def steps() -> int:
        for iteration in range(8):
            Stepper.step(FakeStepper(), None, iteration, 8)  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr(Stepper, "step", lambda stepper, ids, iteration, *others: happened.append(iteration))
    monkeypatch.setattr(worker, "main", steps)
    monkeypatch.setattr(disturbed_train, "SIGNAL_SECONDS", 0.0)
    monkeypatch.setattr(os, "kill", lambda process, number: happened.append((process, number)))
    monkeypatch.setenv(VARIABLE, json.dumps(vars(disturbance)))
    try:
        disturbed_train.main()
    except torch.OutOfMemoryError:
        happened.append("out of memory")
    return happened


def test_a_disturbed_process_stops_its_study_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = (os.getppid(), signal.SIGTERM)
    assert train(monkeypatch, Disturbance(stop_at=7)) == [0, 1, 2, 3, 4, 5, 6, stop, 7]
    assert train(monkeypatch, Disturbance()) == [*range(8)]


def test_a_large_micro_batch_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(monkeypatch, Disturbance(largest_micro=2)) == ["out of memory"]
    assert train(monkeypatch, Disturbance(largest_micro=4)) == [*range(8)]


def test_memory_of_every_gpu_is_limited_to_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[tuple[float, int]] = []

    class Properties:
        total_memory = 1000

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, number: shares.append((share, number))
    )
    train(monkeypatch, Disturbance(memory_bytes=250))
    assert shares == [(0.25, 0), (0.25, 1)]
    train(monkeypatch, Disturbance(memory_bytes=5000))
    assert shares[2:] == [(1.0, 0), (1.0, 1)]


def test_the_undisturbed_study_runs_once_for_all_checks(
    card: CheckedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(card: CheckedDevice, label: str) -> None:
        started.append(label)
        studies.study_folder(card, label).mkdir(parents=True)

    monkeypatch.setattr(studies, "run", run)
    for checks in (studies.memory_checks, studies.out_of_memory_checks):
        with pytest.raises(NotRunError):
            next(checks(card))
    assert started == [studies.UNDISTURBED]


@pytest.mark.parametrize(("with_context", "gpus", "opened"), [([], 0, None), ([], 2, 0), ([1], 2, 1)])
def test_contexts_of_a_process_are_counted(
    with_context: list[int], gpus: int, opened: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", with_context.__contains__, raising=False)
    assert studies.contexts() == opened
