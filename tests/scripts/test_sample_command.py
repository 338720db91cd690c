"""`make sample`: texts of runs on the terminal, as JSON and as a page; errors are one line."""

import json
import sys
from pathlib import Path

import pytest

from runtime.errors import UserError
from scripts import sample
from tests.study.evaluation.test_inspect import a_run, config_file

__all__ = ["config_file"]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["scripts.sample", *arguments])
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return sample.main()


def texts(file: Path) -> dict[str, list[str]]:
    content = json.loads(file.read_text())
    return {run["run"]: [text["text"] for text in run["texts"]] for run in content["runs"]}


def test_runs_are_sampled_side_by_side_and_unchanged(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [a_run(tmp_path / "x/runs", config_file, name) for name in ("B", "RALEARN")]
    before = {path: path.read_bytes() for path in (tmp_path / "x/runs").rglob("*") if path.is_file()}
    arguments = [*map(str, runs), "--prompt", "if ", "--tokens", "9", "--count", "2"]
    assert call(monkeypatch, *arguments) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "x/runs").rglob("*") if path.is_file()} == before
    printed = capsys.readouterr().out
    assert 'after "if·"' in printed
    page = tmp_path / "x/samples/B0-RALEARN0.html"
    assert str(page) in printed
    assert "RALEARN0" in page.read_text()
    found = texts(page.with_suffix(".json"))
    assert {name: len(of) for name, of in found.items()} == {"B0": 2, "RALEARN0": 2}
    assert found["B0"][0] != found["B0"][1]

    # a text depends on its seed alone, and a second call repeats it
    one = ["--tokens", "9", "--prompt", "if ", "--count", "1", "--seed", "1", "--out", str(tmp_path / "one")]
    assert call(monkeypatch, str(runs[0]), *one) == 0
    assert texts(tmp_path / "one/B0.json")["B0"] == found["B0"][1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "40"), "TOKENS=40 after a prompt of 1 exceed the block size 32; fix: TOKENS=31"),
        (("--temperature", "nan"), "TEMPERATURE=nan is out of range; fix"),
        (
            ("--temperature", "1e-300"),
            "TEMPERATURE=1e-300 is too small to divide the logits by; fix: TEMPERATURE=0",
        ),
        (("--top-p", "0"), "TOP_P=0 is out of range; fix"),
    ],
)
def test_a_bad_value_is_one_line(
    arguments: tuple[str, str],
    message: str,
    tmp_path: Path,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = str(a_run(tmp_path / "x/runs", config_file, "B"))
    with pytest.raises(UserError) as found:
        call(monkeypatch, run, *arguments)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
