"""`make import`: weights of transformers become a run that the commands for runs read."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from configuration import commands, rules
from configuration.targets import symbols_for_target
from gpt2.artifacts import run_record
from gpt2.config.config import ModelConfig, load_config
from gpt2.config.vocabulary import BYTES
from gpt2.interop.files import model_config
from gpt2.interop.pretrained import find_pretrained
from gpt2.system.errors import UserError
from scripts.import_model import __main__ as importing
from study.attention.inspect import load_run
from study.export.export import export_run
from study.records.runs import read_runs
from study.records.verify import verify_study
from study.report.build import build_report
from study.sampling.data import SamplingSettings
from study.sampling.draw import sample_runs
from study.transfer.evaluate import evaluate_run
from tests.imported_model import SHAPE, a_model, write_model
from tests.shared_folder import data_folder

IDS = torch.randint(0, BYTES.size, (2, 24), generator=torch.Generator().manual_seed(0))


def call(monkeypatch: pytest.MonkeyPatch, texts: Path, *arguments: str, makeflags: str = "") -> int:
    lines = {"DATASET_FILES": str(texts / "*.txt"), "EVAL_TOKENS": "128", "HELLASWAG": "n"} | data_folder()
    flags = " ".join(f"CONFIG_{name}={value}" for name, value in lines.items())
    monkeypatch.setenv("MAKEFLAGS", f" -- {flags} {makeflags}")
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.setattr(sys, "argv", ["scripts.import_model", *arguments])
    return importing.main()


@pytest.fixture
def imported(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """Import a small model; return the folder of the run."""
    write_model(tmp_path / "small")
    threads = torch.get_num_threads()
    assert call(monkeypatch, texts, str(tmp_path / "small"), "--out", str(tmp_path / "out")) == 0
    torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert "2 layers, 2 heads, width 16, 24 positions, 257 tokens, SHA-256" in output
    assert f"wrote {tmp_path / 'out/runs/small'}" in output
    assert "validation loss" in output
    assert "CONFIG_GPT2_LAYERS=2" in output
    assert "the model has 24 positions; a smaller CONFIG_GPT2_BLOCK_SIZE" in output
    (line,) = [line for line in output.splitlines() if line.startswith("fine-tune variants: make defconfig-")]
    target, *assigned = shlex.split(line.partition(" make defconfig-")[2])
    tree = rules.load_kconfig("cpu")
    commands.configure(tree, commands.read_layers(target), assigned)
    (tmp_path / "config").write_text(rules.render(tree))
    config = load_config(tmp_path / "config")
    find_pretrained(config.init_from).check(
        config.model
    )  # it refuses other positions than 24, such as the default
    assert config.model.block_size == 24
    return tmp_path / "out/runs/small"


def test_the_run_has_the_logits_of_transformers(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = ModelConfig(*SHAPE, 24, 0.0, BYTES.size, BYTES.padded)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**model_config(shape, BYTES.size - 1))
    ).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = write_model(tmp_path / "small") / "tokenizer.json"
    shutil.copy(tokens, tmp_path / "theirs")
    call(monkeypatch, texts, str(tmp_path / "theirs"), "--out", str(tmp_path / "out"))
    run = load_run(tmp_path / "out/runs/theirs")
    with torch.no_grad():
        ours, other = run.model.eval()(IDS), theirs(IDS).logits
    assert (ours - other).abs().max() < 1e-5 * other.abs().max()


def test_the_commands_for_runs_read_it(imported: Path, tmp_path: Path) -> None:
    record, run = run_record.load(imported), load_run(imported)
    assert (record.status, record.imported, record.variant, run.iteration) == ("finished", True, "B", 0)
    assert record.validation
    assert record.validation.loss
    with torch.no_grad():
        assert torch.equal(run.model.eval()(IDS), a_model()(IDS))
    evaluated = evaluate_run(imported, ["bf16"])
    assert evaluated.home
    assert evaluated.home.loss == pytest.approx(record.validation.loss, abs=1e-6)
    (sampled,) = sample_runs([imported], SamplingSettings("a", 4, 1, 0, 1.0, 0, 1.0))
    assert sampled.run == "small"
    exported = export_run(imported, tmp_path / "exported")
    assert exported.difference == 0
    card = " ".join((exported.folder / "README.md").read_text().split())
    assert "They were not trained here" in card
    assert f"(SHA-256 {record.started_from and record.started_from.sha256})" in card.replace("\\", "")
    assert "its verdict holds for that alone" in card
    symbols, _ = symbols_for_target("a100-40g", str(imported / "config"), "")
    assert symbols.integer("GPT2_WIDTH") == 16
    assert load_config(imported / "config").init_from == str(tmp_path / "small")
    assert all(row.problems == [] for row in verify_study(imported.parents[1]))


def test_an_exported_run_comes_back_as_it_was(
    imported: Path, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export_run(imported, tmp_path / "again").folder
    call(monkeypatch, texts, str(folder), "--out", str(tmp_path / "second"))
    second, first = run_record.load(tmp_path / "second/runs/again"), run_record.load(imported)
    assert second.validation
    assert first.validation
    assert second.validation.loss == first.validation.loss
    assert torch.equal(load_run(tmp_path / "second/runs/again").model(IDS), load_run(imported).model(IDS))


def test_it_is_not_judged(imported: Path) -> None:
    (run,) = read_runs(imported.parents[1])
    assert (run.used, run.cause) == (False, "imported")
    assert "not trained here" in run.why_not
    report = build_report(imported.parents[1])
    assert (report.rows, report.verdicts) == ([], [])


def test_a_second_import_does_nothing_and_other_weights_are_refused(
    imported: Path,
    tmp_path: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {path: path.read_bytes() for path in imported.rglob("*") if path.is_file()}
    assert call(monkeypatch, texts, str(tmp_path / "small"), "--out", str(tmp_path / "out")) == 0
    assert f"nothing to do: {imported} has these weights" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in imported.rglob("*") if path.is_file()} == before
    write_model(tmp_path / "small", a_model(seed=1))
    with pytest.raises(UserError, match=r"small is of other weights \(SHA-256 .*\); fix: OUT=another folder"):
        call(monkeypatch, texts, str(tmp_path / "small"), "--out", str(tmp_path / "out"))
    assert {path: path.read_bytes() for path in imported.rglob("*") if path.is_file()} == before


def test_an_import_that_was_stopped_is_completed(
    imported: Path, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_record.load(imported)
    interrupted = json.loads((imported / "run.json").read_text()) | {
        "status": "interrupted",
        "validation": None,
    }
    run_record.write(imported, run_record.from_json(interrupted))
    call(monkeypatch, texts, str(tmp_path / "small"), "--out", str(tmp_path / "out"))
    again = run_record.load(imported)
    assert again.status == "finished"
    assert again.validation
    assert whole.validation
    assert again.validation.loss == whole.validation.loss


def test_faults_are_one_line_with_a_fix(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_model(tmp_path / "small")
    with pytest.raises(UserError, match=r"MODEL names no weights; fix: make import MODEL=gpt2"):
        call(monkeypatch, texts, "--out", str(tmp_path / "out"))
    (tmp_path / "out/runs/small").mkdir(parents=True)
    (tmp_path / "out/runs/small/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"small has other content; fix: OUT=another folder"):
        call(monkeypatch, texts, str(small), "--out", str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"16, 24 positions .*; fix: CONFIG_GPT2_MODEL_CUSTOM=y"):
        call(
            monkeypatch,
            texts,
            str(small),
            "--out",
            str(tmp_path / "o"),
            makeflags="CONFIG_GPT2_BLOCK_SIZE=32",
        )
    with pytest.raises(UserError, match=r"cannot be written: .*; fix: OUT=another folder"):
        call(monkeypatch, texts, str(small), "--out", str(small / "config.json"))
