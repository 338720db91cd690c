"""Whole runs of a very small model in this process: resuming, clocks, records."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt2 import fingerprint, trainer
from gpt2.resume import RunError
from gpt2.trainer import TrainingRun
from gpt2.training_step import NotFiniteError
from gpt2.transformer import CausalSelfAttention
from runtime import attention_kernels, checkpoint, records, run_record
from runtime.batch_plan import WARM_UP_STEPS
from runtime.metrics_log import truncate_metrics
from runtime.settings import Config
from runtime.signals import Stop
from tests import small_runs
from tests.small_runs import StopAfter, outcome, same, start

ITERATIONS = 8
# A run checks for a stop request at its start, after each step and before each batch of its evaluations: 14 checks.
STOPS = {
    1: 0,
    4: 2,
    12: 8,
    14: 8,
}  # check -> the iterations that are finished where it stops the run


def configuration(texts: Path, dropout: float = 0.0, seconds: int = 0) -> Config:
    return small_runs.configuration(texts, ITERATIONS, dropout=dropout, seconds=seconds)


@pytest.mark.parametrize(("name", "dropout"), [("B", 0.0), ("RALEARN", 0.2)])
def test_a_run_stopped_at_any_check_resumes_to_the_same_bits(
    tmp_path: Path, texts: Path, name: str, dropout: float
) -> None:
    config = configuration(texts, dropout)
    assert start(tmp_path / "whole", config, name).train() == "finished"
    expected = outcome(tmp_path / "whole")
    assert len(expected[2]) == ITERATIONS
    for check, iteration in STOPS.items():
        directory = tmp_path / f"stopped{check}"
        assert start(directory, config, name, StopAfter(check)).train() == "interrupted", check
        record = run_record.load(directory)
        assert (record.status, record.progress.iterations) == ("interrupted", iteration), check
        assert start(directory, config, name).train() == "finished"
        assert same(outcome(directory), expected)


class Fading(CausalSelfAttention):
    """Its output depends on the step, also in evaluation."""

    amount = 0.0

    def begin_step(self, iteration: int) -> None:
        self.amount = 1 / (2 + iteration)

    def attend(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        return self.amount * self.fused(q_BHTD, k_BHTD, v_BHTD)


def test_an_evaluation_after_resuming_has_the_state_of_the_last_step(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts)

    def run(name: str, stop: Stop | None = None) -> str:
        return start(tmp_path / name, config, stop=stop, attention=lambda layer: Fading(16, 2)).train()

    assert run("whole") == "finished"
    for check in (4, max(STOPS)):
        assert run(f"stopped{check}", StopAfter(check)) == "interrupted"
        assert run(f"stopped{check}") == "finished"
        assert same(outcome(tmp_path / f"stopped{check}"), outcome(tmp_path / "whole")), check


def test_clocks_continue_after_an_interruption(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts)
    start(tmp_path, config, stop=StopAfter(12)).train()
    before = run_record.load(tmp_path).clock.to_json()
    start(tmp_path, config).train()
    after = run_record.load(tmp_path).clock.to_json()
    assert before["train"] > 0
    assert all(after[name] >= before[name] for name in before)


def test_a_finished_run_leaves_a_full_record(tmp_path: Path, texts: Path) -> None:
    start(tmp_path, configuration(texts), "RALEARN").train()
    record = run_record.load(tmp_path)
    assert record.schedule == run_record.Schedule(ITERATIONS, cut=False)
    assert record.progress.tokens == ITERATIONS * 4 * 16
    assert [row[0] for row in record.validation.history] == [128, 256, 384, 512]
    assert len(record.learned.alternation_probability) == 2
    assert record.memory.peak_reserved_bytes > 0
    assert json.loads((tmp_path / "memory.json").read_text())["by_phase"]["backward"] is not None
    rows = records.read_rows(tmp_path, (record.study, "RALEARN", 0))
    losses = {row.tokens: row for row in rows if (row.dataset, row.metric) == ("validation", "loss")}
    assert [[tokens, row.value] for tokens, row in losses.items()] == [
        [t, loss] for t, _, loss in record.validation.history
    ]
    values = records.read_items(tmp_path, losses[record.progress.tokens])
    assert values.mean() == pytest.approx(record.validation.loss, rel=1e-12)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_the_recorded_attention_kernel_is_the_one_observed_in_a_step(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """The check before training runs flash. Without a step in a process, the record of the last one remains."""
    if kernel != "flash":
        monkeypatch.setattr(attention_kernels, "kernels_of", lambda operations: {kernel})
    monkeypatch.setattr(trainer, "OBSERVED_DEVICES", ["cpu"])
    run = start(tmp_path, configuration(texts), stop=StopAfter(max(STOPS)))
    assert run.log.record["target"]["attention_backend"] == "flash"
    assert run.train() == "interrupted"
    for _ in range(2):
        record = run_record.load(tmp_path)
        assert record.target.attention_backend == kernel
        differs = f"attention ran {kernel} in training; the check before it ran flash"
        assert record.notes.count(differs) == (kernel != "flash")
        run = start(tmp_path, configuration(texts))
        run.train()
        assert run.steps_made == 0


def test_a_slow_run_finishes_its_count_beyond_the_time_limit(tmp_path: Path, texts: Path) -> None:
    run = start(tmp_path, configuration(texts, seconds=1))
    run.clocks._seconds["train"] = 10_000.0  # as on a machine that is far slower than when steps were timed
    assert run.train() == "finished"
    record = run_record.load(tmp_path)
    assert record.schedule.cut is False
    assert record.progress.iterations == ITERATIONS


def test_a_hard_limit_of_wall_time_ends_the_run_with_a_note(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts)
    budget = dataclasses.replace(config.budget, hard_limit_seconds=5000)
    run = start(tmp_path, dataclasses.replace(config, budget=budget))
    run.clocks._seconds["evaluate"] = 5001.0
    assert run.train() == "finished"
    record = run_record.load(tmp_path)
    assert record.schedule.cut is True
    assert record.progress.iterations == 1
    assert any("CONFIG_GPT2_HARD_LIMIT (5000 s)" in note for note in record.notes)


def test_a_loss_that_is_not_finite_stops_the_run_before_the_optimizer(tmp_path: Path, texts: Path) -> None:
    run = start(tmp_path, configuration(texts))
    with torch.no_grad():
        run.stepper.model.blocks[1].mlp.fc.weight[0, 0] = float("nan")
    before = {name: value.clone() for name, value in run.stepper.model.state_dict().items()}
    with pytest.raises(NotFiniteError, match=r"blocks\.1\.mlp\.fc\.weight"):
        run.train()
    after = run.stepper.model.state_dict()
    assert all(torch.equal(before[name], after[name]) or name == "blocks.1.mlp.fc.weight" for name in before)
    record = run_record.load(tmp_path)
    assert record.status == "failed"
    assert "NotFiniteError" in record.error


def interrupted(directory: Path, config: Config) -> None:
    run = start(directory, config, stop=StopAfter(5))
    assert run.train() == "interrupted"
    assert 0 < run.iteration < ITERATIONS


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts)
    interrupted(tmp_path / "run", config)
    other = tmp_path / "texts"
    other.mkdir()
    for path in texts.glob("*.txt"):
        (other / path.name).write_text(path.read_text() + " The end.")
    settings = dataclasses.replace(config.data, files=(str(other / "*.txt"),))
    changed = dataclasses.replace(config, data=settings)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run" / "checkpoint").rglob("*.pt")}
    with pytest.raises(RunError, match=r"B0 was started with another data, validation"):
        start(tmp_path / "run", changed).train()
    assert run_record.load(tmp_path / "run").status == "failed"
    assert before == {
        path.name: path.read_bytes() for path in (tmp_path / "run" / "checkpoint").rglob("*.pt")
    }
    assert start(tmp_path / "run", config).train() == "finished"


def test_a_run_is_not_resumed_to_another_count(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts)
    interrupted(tmp_path, config)
    run = start(tmp_path, config)
    run.plan = run.plan.replace(iterations=2 * ITERATIONS)
    with pytest.raises(RunError, match=rf"iterations \({ITERATIONS} -> {2 * ITERATIONS}\)"):
        run.train()


def test_a_run_is_not_resumed_by_code_that_computes_other_numbers(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(texts)
    interrupted(tmp_path, config)
    monkeypatch.setattr(fingerprint, "NUMBERS", fingerprint.NUMBERS + 1)
    with pytest.raises(RunError, match="numbers"):
        start(tmp_path, config).train()


def altered(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Overwrite the newest checkpoint with its plain data changed in place."""
    loaded = checkpoint.load_latest(directory / "checkpoint")
    assert loaded
    change(loaded.meta)
    checkpoint.save(directory / "checkpoint", loaded.iteration, loaded.state, loaded.meta, keep=1)


def test_a_checkpoint_without_the_description_of_its_run_is_refused(tmp_path: Path, texts: Path) -> None:
    config = configuration(texts)
    interrupted(tmp_path, config)
    altered(tmp_path, lambda meta: meta.pop("of"))
    with pytest.raises(RunError, match=r"checkpoint of B0 .*fix: .*CONFIG_STUDY_NAME") as caught:
        start(tmp_path, config).train()
    assert "\n" not in str(caught.value)


def test_batches_come_in_order_until_one_cannot_be_read() -> None:
    def make(iteration: int) -> np.ndarray:
        if iteration == 9:
            raise OSError("shard gone")
        return np.full((2, 3), iteration, dtype=np.uint16)

    threads = threading.active_count()
    with contextlib.closing(trainer.prefetched(make, range(4, 99), "cpu")) as batches:
        assert [int(next(batches)[0, 0]) for _ in range(5)] == [4, 5, 6, 7, 8]
        with pytest.raises(OSError, match="shard gone"):
            next(batches)
    assert threading.active_count() == threads


def test_recorded_peaks_begin_after_the_warm_up_steps(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path, configuration(texts))
    restarts = []
    restart = run.meter.restart
    monkeypatch.setattr(run.meter, "restart", lambda: (restarts.append(run.steps_made), restart()))
    run.train()
    assert restarts == [WARM_UP_STEPS]


def wsd(texts: Path) -> Config:
    return small_runs.configuration(texts, ITERATIONS, schedule=("wsd", 0.3))


def with_warmup(run: TrainingRun, warmup: int) -> TrainingRun:
    plan = run.plan.replace(warmup_iterations=warmup)
    return TrainingRun(run.directory, plan, run.config, run.resolved, None, run.stop)


def test_a_run_is_not_resumed_with_another_warm_up(tmp_path: Path, texts: Path) -> None:
    config = wsd(texts)
    run = with_warmup(start(tmp_path, config, stop=StopAfter(5)), 2)
    assert run.train() == "interrupted"
    with pytest.raises(RunError, match=r"warmup_iterations \(2 -> 3\)"):
        with_warmup(start(tmp_path, config), 3).train()
    assert with_warmup(start(tmp_path, config), 2).train() == "finished"


def test_metrics_after_the_checkpoint_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"event": "note", "iteration": k}) + "\n" for k in (1, 2, 3, 4)) + '{"iterat'
    )
    truncate_metrics(path, 3)
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_validation_that_will_be_repeated_is_dropped_from_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"event": "validation", "iteration": k, "tokens": 10 * k} for k in (2, 4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    truncate_metrics(path, 4, [20])
    assert [json.loads(line)["tokens"] for line in path.read_text().splitlines()] == [20]
