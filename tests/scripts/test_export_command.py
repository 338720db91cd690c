"""`make export`: transformers, or `ra.exported.load_run`, loads the folder and computes the logits of the run."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ra import arms
from ra.exported import WEIGHTS, load_run
from runtime.errors import UserError
from scripts import export
from study.evaluation import loaded_runs as inspect
from tests.study.evaluation.test_inspect import a_run, config_file

__all__ = ["config_file"]
IDS = torch.arange(4, 28)[None]
SCALED = """import torch
from gpt2.transformer import CausalSelfAttention

class Scaled(CausalSelfAttention):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.scale = 2 + torch.rand(())

    def attend(self, q, k, v):
        return self.fused(q, k, self.scale * v)

def attention(layer, spec):
    return Scaled(spec.width, spec.heads, spec.dropout)
"""


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts.export", *arguments])
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return export.main()


@torch.no_grad()
def logits_of_run(run_dir: Path) -> torch.Tensor:
    found: torch.Tensor = inspect.load_run(run_dir).model.eval()(IDS)
    return found


@pytest.mark.parametrize("variant", ["B", "RAEARLY"])
def test_transformers_loads_gpt2_and_the_fixed_patterns(
    variant: str,
    tmp_path: Path,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transformers = pytest.importorskip("transformers")
    run_dir = a_run(tmp_path / "x/runs", config_file, variant)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert call(monkeypatch, str(run_dir)) == 0
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    folder = tmp_path / "x/export" / run_dir.name
    assert f"GPT2LMHeadModel.from_pretrained('{folder}')" in capsys.readouterr().out
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokens.decode(tokens("def f(x):")["input_ids"]) == "def f(x):"
    ours = logits_of_run(run_dir)
    with torch.no_grad():
        other = theirs(IDS).logits
    assert (ours - other).abs().max() < 1e-5 * ours.abs().max()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read one may read all


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A custom variant SCALED that the study of `tmp_path`/x recorded. Returns its file in ra/custom."""
    custom, own = tmp_path / "custom", tmp_path / "x/own"
    for folder in (custom, own):
        folder.mkdir(parents=True)
        (folder / "scaled.py").write_text(SCALED)
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", custom)
    monkeypatch.setattr("ra.custom.__path__", [str(custom)])
    yield custom / "scaled.py"
    sys.modules.pop("ra.custom.scaled", None)


@pytest.mark.parametrize("variant", ["RALEARN", "SCALED+MLP=swiglu"])
def test_load_run_has_the_logits_of_every_other_arm(
    variant: str,
    scaled: Path,
    tmp_path: Path,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir, out = a_run(tmp_path / "x/runs", config_file, variant), tmp_path / "out"
    assert call(monkeypatch, str(run_dir), "--out", str(out)) == 0
    assert f"load_run('{out}')" in capsys.readouterr().out
    expected = logits_of_run(run_dir)
    scaled.unlink()
    with torch.no_grad():
        assert torch.equal(load_run(out)(IDS), expected)
    weights = out / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cannot be read: .*; fix: make export"):
        load_run(out)


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "x/runs", config_file, "B")
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"full exists; fix: remove it, or OUT=another folder"):
        call(monkeypatch, str(run), "--out", str(full))
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]
    with pytest.raises(UserError, match=r"cannot be written: .*; fix: OUT=another folder"):
        call(monkeypatch, str(run), "--out", str(full / "thesis.txt/x"))
    for arguments in ((), (str(run), str(run))):
        with pytest.raises(UserError, match="fix: make export"):
            call(monkeypatch, *arguments)
    with pytest.raises(UserError, match="absent is not a folder; fix: "):
        call(monkeypatch, str(tmp_path / "absent"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UserError, match="safetensors is not installed; fix"):
        call(monkeypatch, str(run))
