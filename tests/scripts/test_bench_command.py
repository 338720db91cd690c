"""`make bench` as it is typed: what it measures, what it writes while it goes on, and how it ends."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import runner as bench
from bench.cases import SHAPES, Shape
from bench.workers import BenchError
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import resolve
from gpt2.system.errors import UserError
from scripts import bench as script

ROOT = Path(__file__).parents[2]
CASES = (("plain", 4), ("plain", 8), ("B", 8), ("RALEARN", 8))
SHAPE = Shape("small", 2, 2, 16, 8, CASES, effective=8, plain_micro=4)
Measured = list[tuple[str, int, float]]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the bench writes on what it takes for a GPU, with a shape of its own."""
    resolved = dataclasses.replace(resolve.resolve(ANY_TARGET), device="cuda:0")
    monkeypatch.setattr(resolve, "resolve", lambda config: resolved)
    monkeypatch.setitem(SHAPES, "cuda", (SHAPE,))
    monkeypatch.setattr(script, "OUT", tmp_path / "results" / "bench.json")
    return script.OUT


def measuring(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Measured], None] = lambda measured: None
) -> Measured:
    """Made-up measurements in turn, each after a call of `before`; what was measured."""
    measured: Measured = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        measured.append((case, micro, seconds))
        before(measured)
        names = ("step_seconds", "tokens_per_second", "flops_per_token", "nanogpt_flops_per_token")
        return dict.fromkeys(names, 100.0) | {"peak_bytes": 2**30}

    monkeypatch.setattr(bench, "in_a_process", measure)
    return measured


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    return script.main()


def written(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file, and the one stage in it."""
    found = json.loads(out.read_text())
    (stage,) = found["shapes"]["small"]
    return found, stage


def test_a_bench_that_is_killed_has_kept_every_round_but_the_last(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(measured: Measured) -> None:
        if len(measured) == 2 * len(CASES) + 3:
            raise KeyboardInterrupt

    measuring(monkeypatch, killed)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch)
    found, stage = written(out)
    assert found["complete"] is False
    assert [(sample["case"], sample["micro"], sample["round"]) for sample in stage["samples"]] == [
        (*case, number) for number in (0, 1) for case in CASES
    ]
    assert [(row["case"], row["micro"]) for row in stage["rows"]] == list(CASES)


def test_a_bench_that_comes_to_its_end_says_so_and_explains_its_ratios(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete: list[bool] = []

    def look(measured: Measured) -> None:
        if len(measured) > len(CASES):
            incomplete.append(json.loads(out.read_text())["complete"])

    measured = measuring(monkeypatch, look)
    assert run(monkeypatch) == 0
    rounds, seconds = bench.DEFAULTS["cuda"]
    assert measured == [(*case, seconds) for _ in range(rounds) for case in CASES]
    assert set(incomplete) == {False}
    found, stage = written(out)
    assert found["complete"] is True
    assert stage["sequences_a_step"] == 8
    assert stage["left_out"] == []
    shown = capsys.readouterr().out
    assert "8 sequences an optimizer step" in shown
    assert "4 x 2" in shown
    assert "default micro-batch (4 in small)" in shown
    assert "blocks of 8, with one synchronisation" in shown
    assert shown.count("written: ") == 1


def test_only_the_cases_asked_for_are_measured(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring(monkeypatch)
    assert run(monkeypatch, "--cases", "RALEARN plain@8", "--rounds", "2", "--seconds", "1") == 0
    assert measured == [("plain", 8, 1.0), ("RALEARN", 8, 1.0)] * 2


def test_a_case_that_is_not_there_is_refused_before_anything_is_measured(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measuring(monkeypatch)
    with pytest.raises(UserError, match="no case is called 'XB' here; there are plain"):
        run(monkeypatch, "--cases", "B XB")
    assert not measured
    assert not out.exists()


def test_a_bench_that_could_measure_nothing_fails_and_keeps_the_reasons(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(measured: Measured) -> None:
        raise BenchError(f"{measured[-1][0]}: out of memory")

    measured = measuring(monkeypatch, fail)
    with pytest.raises(UserError, match="nothing could be measured"):
        run(monkeypatch)
    assert len(measured) == len(CASES)
    found, stage = written(out)
    assert found["complete"] is False
    assert stage["left_out"] == [f"{case}: out of memory" for case, _ in CASES]
    assert "left out: RALEARN: out of memory" in capsys.readouterr().out


def test_fewer_than_one_round_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--rounds 0; right: at least 1"):
        run(monkeypatch, "--rounds", "0")


def test_a_shape_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", "--shape", "none"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no shape is called 'none' here; there are" in done.stderr


def test_make_hands_the_cases_over() -> None:
    done = subprocess.run(
        ["make", "-n", "bench", "CASES=plain B@32", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "-m scripts.bench" in done.stdout, done.stderr
    assert "--cases 'plain B@32'" in done.stdout
