"""`make repeat` repeats a step of a run, names an injected fault, and leaves the run's folder as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2 import transformer
from runtime.errors import UserError
from scripts import repeat as command
from tests.scripts.faulty_runs import train, workplace


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run in a folder in which the tests run."""
    with workplace(tmp_path_factory.mktemp("place")) as folder:
        yield folder / train("B", "study", GPT2_MAX_ITERS="3", GPT2_DROPOUT="0.1")


def repeat(monkeypatch: pytest.MonkeyPatch, **given: Any) -> int:
    monkeypatch.setattr(
        "sys.argv", ["scripts.repeat", *(f"--{name}={value}" for name, value in given.items())]
    )
    return command.main()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_step_of_a_run_is_reproducible_in_fresh_processes_as_well(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run_dir)
    monkeypatch.setattr("referee.numerics.repeat.conditions.FRESH_PROCESSES", 1)
    assert repeat(monkeypatch, run=run_dir, step=3, times=2) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 replayed steps equal metrics.jsonl in loss and gradient norm, to the bit" in printed
    found = json.loads((run_dir.parents[1] / "repeat/B0/step3/repeat.json").read_text())
    assert found["fault"] is False
    conditions = {row["call"]: (row["place"], row["target"]) for row in found["rows"]}
    assert conditions["not observed"] == conditions["observed"] == ("repetitions: 2", "equal")
    assert conditions["fresh processes"] == ("repetitions: 1", "")
    assert content(run_dir) == before


def test_an_injected_fault_is_named_with_its_module(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = transformer.MLP.forward

    def unwritten(self: Any, x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(len(x) + 1, *x.shape[1:])
        buffer[:-1] = forward(self, x)
        return buffer.nan_to_num(1e-3, 1e-3, 1e-3).clamp(-1.0, 1.0).sum(0) * 1e-3 + buffer[:-1]

    monkeypatch.setattr(transformer.MLP, "forward", unwritten)
    monkeypatch.setattr("referee.numerics.repeat.conditions.FRESH_PROCESSES", 0)  # they lack the fault
    assert repeat(monkeypatch, run=run_dir, step=2, times=2, out=tmp_path) == 1
    found = json.loads((tmp_path / "repeat.json").read_text())
    assert found["conclusion"] == "uninitialised memory"
    assert "blocks.0.mlp" in found["rows"][0]["call"]
    assert "not equal to the run: step 1 differs from the run" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": "9"}, "STEP=9 is not a step of B0"),
        ({"times": "1"}, "TIMES=1 is not a number from 2 to 1000"),
        ({"out": "INSIDE"}, "is in the run's folder"),
    ],
)
def test_a_wrong_variable_is_one_line(
    given: dict[str, str], message: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(run_dir)
    given = {name: str(run_dir / "repeat") if value == "INSIDE" else value for name, value in given.items()}
    with pytest.raises(UserError) as caught:
        repeat(monkeypatch, **({"run": str(run_dir), "step": "2"} | given))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert content(run_dir) == before
