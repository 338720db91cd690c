"""The check of free disk space before a study."""

from pathlib import Path

import pytest
import torch

from bench.card_studies import configure_study
from gpt2.training_step import Stepper
from runtime import checkpoint
from runtime.batch_plan import plan_batch
from runtime.errors import UserError
from runtime.settings import ModelConfig, OptimizerConfig
from study import preconditions

MODEL = ModelConfig("test", 2, 2, 64, 32, 0.0)


def test_the_estimate_covers_a_real_checkpoint(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(3e-3, 0.1, 0.2, 0.1, 0.9, 0.95, 1e-8, 1.0)
    stepper = Stepper(
        MODEL,
        optimizer,
        plan_batch(2, 2, 1, 32),
        seed=0,
        device="cpu",
        dtype="float32",
        compile=False,
        parts=None,
    )
    stepper.step(torch.randint(0, 1000, (2, 33)), 0, 10)
    saved = checkpoint.save(tmp_path, 1, stepper.state(), {})
    size = sum(path.stat().st_size for path in saved.iterdir())
    assert size == pytest.approx(preconditions.BYTES_A_PARAMETER * MODEL.parameters, rel=0.01)


def test_a_disk_without_enough_space_is_refused_with_the_required_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "free_bytes", lambda path: 10 * 2**20)
    with pytest.raises(UserError, match=r"10 MiB of free space; 3 runs need about .*CONFIG_RESULTS_DIR"):
        preconditions.require_space(tmp_path, MODEL.parameters, [100, 100, 100])
    preconditions.require_space(tmp_path, MODEL.parameters, [])


def test_a_full_disk_is_refused_before_the_examination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = configure_study(tmp_path, "gpt2-ra-ablation-smoke")
    monkeypatch.setattr(preconditions, "free_bytes", lambda path: 10 * 2**20)
    monkeypatch.setattr(study, "admit", pytest.fail)
    with pytest.raises(UserError, match="10 MiB of free space"):
        study.run()


def test_bytes_that_a_started_run_has_written_are_not_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint" / "00000007").mkdir(parents=True)
    (tmp_path / "checkpoint" / "00000007" / "state.pt").write_bytes(b"x" * 1000)
    assert preconditions.checkpoint_bytes(tmp_path) == 1000
    assert preconditions.checkpoint_bytes(tmp_path / "nothing") == 0
    needed = preconditions.needed_bytes(MODEL.parameters, [100, 100])
    monkeypatch.setattr(preconditions, "free_bytes", lambda path: needed - 1000)
    with pytest.raises(UserError, match="of free space; 2 runs need about"):
        preconditions.require_space(tmp_path, MODEL.parameters, [100, 100])
    preconditions.require_space(tmp_path, MODEL.parameters, [100, 100], written=1000)
