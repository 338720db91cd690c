"""A run of a custom variant is loaded with the file that its study recorded."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt2.initial_weights import initialise
from gpt2.training_step import build_model
from ra import arms
from ra.variants import variant
from runtime import checkpoint, run_record
from runtime.dotconfig import read_symbols
from runtime.settings import Config
from study.evaluation import loaded_runs as inspect
from tests.checked_files import write_checked
from tests.study.evaluation.test_inspect import config_file

__all__ = ["config_file"]

SHIFT = '''"""GPT-2's attention with a scaled value."""
from gpt2.transformer import CausalSelfAttention
from ra.custom import _shift_helper

class Scaled(CausalSelfAttention):
    def attend(self, q, k, v):
        return self.fused(q, k, v * _shift_helper.FACTOR * SCALE)

def attention(layer, spec):
    return Scaled(spec.width, spec.heads, spec.dropout)
'''
IDS = torch.arange(16)[None]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_file: Path) -> Iterator[Path]:
    """A run of SHIFT whose study recorded SCALE = 1. ra/custom is `tmp_path`/custom."""
    custom, run_dir = tmp_path / "custom", tmp_path / "study/runs/SHIFT0"
    for folder in (custom, run_dir, tmp_path / "study/own"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", custom)
    monkeypatch.setattr("ra.custom.__path__", [str(custom)])
    (custom / "_shift_helper.py").write_text("FACTOR = 3.0\n")
    for path in (custom / "shift.py", tmp_path / "study/own/shift.py"):
        path.write_text(SHIFT + "SCALE = 1.0\n")
    (run_dir / "config").write_text(config_file.read_text())
    symbols = read_symbols(run_dir / "config")
    config = Config.from_symbols(symbols)
    parts = variant("SHIFT", config.model, config.alternation).parts
    model = build_model(config.model, parts)
    initialise(model, 0)
    write_checked(run_dir / "run.json", run_record.blank("SHIFT0", "SHIFT", 0).to_json())
    checkpoint.save(run_dir / "checkpoint", 7, {"model": model.state_dict()}, {})
    yield run_dir
    for module in ("ra.custom.shift", "ra.custom._shift_helper"):
        sys.modules.pop(module, None)


def outputs(run: inspect.TrainedRun) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = run.model.eval()(IDS)
    return found


@pytest.mark.parametrize("now", ["SCALE = 2.125\n", None], ids=["changed", "removed"])
def test_another_file_in_the_checkout_changes_nothing_and_a_note_says_so(
    run_dir: Path, tmp_path: Path, now: str | None
) -> None:
    before = inspect.load_run(run_dir)
    assert before.notes == []
    source = tmp_path / "custom/shift.py"
    source.write_text(SHIFT + now) if now else source.unlink()
    after = inspect.load_run(run_dir)
    assert torch.equal(outputs(before), outputs(after))
    copy = tmp_path / "study/own/shift.py"
    assert after.notes == [f"shift.py is the study's copy, {copy}; ra/custom/shift.py differs from it"]
    if now:  # the other file computes something else
        copy.unlink()
        sys.modules.pop("ra.custom.shift", None)
        assert not torch.allclose(outputs(before), outputs(inspect.load_run(run_dir)))
    else:
        assert arms.custom_variants() == []
