"""A checkpoint with a valid checksum that does not fit the run is named in one line and never trained on."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.optimizer import parameter_groups
from gpt2.resume import RunError, check_fits, refuse_altered_metrics
from runtime import checkpoint
from runtime.checkpoint import CheckpointError
from runtime.metrics_log import metrics_sum

MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
OPTIMIZER = torch.optim.AdamW(parameter_groups(MODEL, weight_decay=0.1), fused=True)
MODEL(torch.ones(2, 3)).square().sum().backward()
OPTIMIZER.step()


def a_state() -> dict[str, Any]:
    return copy.deepcopy({"model": dict(MODEL.state_dict()), "optimizer": OPTIMIZER.state_dict()})


def loaded(folder: Path, state: Any, iteration: int = 5) -> checkpoint.LoadedCheckpoint:
    checkpoint.save(folder, iteration, state, {})
    found = checkpoint.load_latest(folder)
    assert found
    return found


def test_a_checkpoint_of_the_run_fits_its_model_with_and_without_the_optimizer(tmp_path: Path) -> None:
    found = loaded(tmp_path, a_state())
    check_fits(found, 5, MODEL, OPTIMIZER)
    check_fits(found, 5, MODEL)
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    MODEL.load_state_dict(found.state["model"])
    OPTIMIZER.load_state_dict(found.state["optimizer"])
    assert all(torch.equal(before[name], value) for name, value in MODEL.state_dict().items())


HARMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shape": (
        lambda s: s["model"].update({"0.bias": torch.zeros(5)}),
        r"model.0.bias is float32 \(5,\); float32 \(4,\) expected",
    ),
    "dtype": (lambda s: s["model"].update({"0.bias": torch.zeros(4).double()}), "model.0.bias is float64"),
    "missing": (lambda s: s["model"].pop("1.weight"), "model.1.weight is missing; float32"),
    "extra": (lambda s: s["model"].update({"2.bias": torch.zeros(5)}), "2.bias is float32 .*; no such entry expected"),
    "no dictionary": (lambda s: s.update({"model": [1, 2]}), "model.0.weight is missing"),
    "moment": (
        lambda s: s["optimizer"]["state"][0].update({"exp_avg": torch.zeros(1)}),
        "optimizer.state.0.exp_avg is float32",
    ),
    "group": (lambda s: s["optimizer"]["param_groups"].pop(), "param_groups.1.lr_multiplier is missing"),
    "no optimizer": (lambda s: s.pop("optimizer"), "param_groups.0.lr_multiplier is missing"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_another_state_is_named_by_its_first_entry_in_one_line(tmp_path: Path, harm: str) -> None:
    state, (change, message) = a_state(), HARMS[harm]
    change(state)
    with pytest.raises(CheckpointError, match=f"00000005 does not fit the model: .*{message}") as caught:
        check_fits(loaded(tmp_path, state), 5, MODEL, OPTIMIZER)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_beyond_the_plan_or_of_another_iteration_than_its_folder_is_skipped(
    tmp_path: Path,
) -> None:
    for iteration in (4, 1_000_000_000):
        checkpoint.save(tmp_path, iteration, a_state(), {})
    found = checkpoint.load_latest(tmp_path, lambda each: check_fits(each, 60, MODEL, OPTIMIZER))
    assert found
    assert found.iteration == 4
    assert "1000000000 is beyond the 60 iterations of the run" in found.skipped[0]
    (tmp_path / "1000000000").rename(tmp_path / "00000050")
    found = checkpoint.load_latest(tmp_path)
    assert found
    assert found.iteration == 4
    assert "00000050 has iteration 1000000000 in its meta.json" in found.skipped[0]


def test_losses_that_were_altered_or_cut_while_a_run_was_stopped_are_named_and_not_believed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = b'{"event": "train", "iteration": 1, "tokens": 8, "loss": 4.5}\n'
    path.write_bytes(lines)
    recorded = metrics_sum(path)
    path.write_bytes(lines + b'{"event": "train", "iter')  # of steps after the checkpoint
    refuse_altered_metrics(recorded, path)
    for content in (lines.replace(b"4.5", b"1.5"), lines[:-2], b""):
        path.write_bytes(content)
        with pytest.raises(RunError, match=r"metrics\.jsonl was altered or cut"):
            refuse_altered_metrics(recorded, path)
    path.unlink()
    with pytest.raises(RunError, match="fix: restore the file"):
        refuse_altered_metrics(recorded, path)
