"""`make export`: transformers loads the folder and computes the logits of the run."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

from gpt2.artifacts import run_record
from gpt2.artifacts.run_record import EvalSetEntry
from gpt2.system import files
from gpt2.system.errors import UserError
from scripts.export import __main__ as export
from study.attention.inspect import load_run
from study.export import export as exporting
from tests.study.attention.test_inspect import a_run, config_file

__all__ = ["config_file"]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts.export", *arguments])
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return export.main()


@pytest.mark.parametrize("variant", ["B", "RAALL", "RAALT", "RA:1", "B+AQN=mild"])
def test_transformers_loads_the_folder_and_has_the_logits_of_the_run(
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
    assert str(folder) in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    run = load_run(run_dir)
    ids = torch.tensor([tokens("def f(x):\n    return x")["input_ids"]])
    with torch.no_grad():
        ours, other = run.model.eval()(ids), theirs(ids).logits
    assert (ours - other).abs().max() < 1e-5 * ours.abs().max()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # who may read one may read all
    card = (folder / "README.md").read_text()
    assert f"variant {variant}" in card.replace("\\", "")
    assert ("exchanged" in card) is (variant in ("RAALL", "RAALT", "RA:1"))
    assert call(monkeypatch, str(run_dir)) == 0  # a second export replaces the first


def test_the_card_has_the_perplexities_of_held_out_texts(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = a_run(tmp_path / "x/runs", config_file, "B")
    entry = EvalSetEntry(1, 5500, 1000, 5500, 1.0, math.e, math.exp(5.5), math.e, 1 / math.log(2), "a", "b")
    record = dataclasses.replace(run_record.load(run_dir), eval_sets={"news": entry})
    files.write_json(run_dir / "run.json", record.to_json())
    assert call(monkeypatch, str(run_dir)) == 0
    card = (tmp_path / "x/export/B0/README.md").read_text()
    assert "| news: perplexity by word | 244.69 |" in card
    assert "| news: bits per byte | 1.443 |" in card


def test_another_arm_needs_trust_remote_code_and_replaces_the_files_of_an_earlier_export(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    gated = a_run(tmp_path / "x/runs", config_file, "GATED")
    plain = a_run(tmp_path / "x/runs", config_file, "B")
    out = tmp_path / "exported"
    assert call(monkeypatch, str(gated), "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert f"from_pretrained('{out}', trust_remote_code=True)" in printed
    assert "largest difference of a logit to the run: " in printed
    assert {"modeling_arm.py", "ra_published_gated.py", "LICENSE"} <= {path.name for path in out.iterdir()}
    assert call(monkeypatch, str(plain), "--out", str(out)) == 0
    assert not list(out.glob("*.py"))
    (out / "mine.py").write_text("print(1)\n")
    with pytest.raises(UserError, match=r"has other content \(mine.py\); fix: OUT=an empty folder"):
        call(monkeypatch, str(gated), "--out", str(out))


def test_without_the_exchange_the_export_is_refused(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = a_run(tmp_path / "x/runs", config_file, "RAALL")
    monkeypatch.setattr(exporting, "swap_query_and_key", lambda model, layers: None)
    with pytest.raises(UserError, match="compute something else"):
        call(monkeypatch, str(run_dir))
    assert not (tmp_path / "x/export").exists()


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = a_run(tmp_path / "x/runs", config_file, "RALEARN")
    run = a_run(tmp_path / "x/runs", config_file, "B")
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not UTF-8 text; fix: OUT=another folder"):
        call(monkeypatch, str(run), "--out", str(tmp_path / "n\udcff"))
    with pytest.raises(UserError, match=r"has other content \(thesis.txt\); fix: OUT=an empty folder"):
        call(monkeypatch, str(run), "--out", str(full))
    assert [path.name for path in full.iterdir()] == ["thesis.txt"]
    for arguments in ((), (str(run), str(learned))):
        with pytest.raises(UserError, match="fix: make export"):
            call(monkeypatch, *arguments)
    fix = r"; fix: RUN=results/STUDY/runs/NAME of a run that exists$"
    with pytest.raises(UserError, match=f"absent is not a folder{fix}"):
        call(monkeypatch, str(tmp_path / "absent"))
    with pytest.raises(UserError, match=f"full/run.json does not exist, so .*full is not a run{fix}"):
        call(monkeypatch, str(full))
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(UserError, match="safetensors is not installed; fix"):
        call(monkeypatch, str(run))
