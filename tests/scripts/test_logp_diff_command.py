"""`make logp-diff`: a run samples with a KV cache and is compared with the pass of training."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2 import sampling
from runtime.errors import UserError
from scripts import logp_diff
from study.evaluation import loaded_runs as inspect
from study.evaluation.loaded_runs import load_run
from tests.study.evaluation.test_inspect import a_run, config_file

__all__ = ["config_file"]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts.logp_diff", *arguments])
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return logp_diff.main()


@pytest.mark.parametrize("variant", ["B", "RALEARN"])
def test_sampling_of_a_run_agrees_with_its_training_pass(
    variant: str,
    tmp_path: Path,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = a_run(tmp_path, config_file, variant)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert call(monkeypatch, str(run), "--out", str(tmp_path / "out"), "--threshold", "0.001") == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    printed = capsys.readouterr().out
    assert "logp_diff: within the threshold" in printed
    content = json.loads((tmp_path / "out" / "logp_diff.json").read_text())
    assert all(abs(value) <= 0.001 for row in content["differences"] for value in row)
    assert len(content["differences"]) == 4


def test_a_cache_that_is_not_cleared_is_named(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sampling.Cache, "clear", lambda cache: setattr(cache, "length", 0))
    note = "shift.py is the study's copy"
    monkeypatch.setattr(inspect, "load_run", lambda folder: replace(load_run(folder), notes=[note]))
    assert call(monkeypatch, str(a_run(tmp_path, config_file, "B"))) == 0
    printed = capsys.readouterr().out
    assert "within the threshold" not in printed
    first = next(line for line in printed.splitlines() if line.startswith("sequence"))
    assert first.startswith("sequence 1 ")
    assert f"B0: {note}\n" in printed


def test_unusable_arguments_are_one_line(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(a_run(tmp_path, config_file, "B"))
    for arguments in ((), (run, run), (str(tmp_path / "absent"),), (run, "--threshold", "-1"),
                      (run, "--threshold", "x")):  # fmt: skip
        with pytest.raises(UserError) as found:
            call(monkeypatch, *arguments)
        assert "fix:" in str(found.value)
        assert "\n" not in str(found.value)
