"""The speed suite: a run that is killed, and one that ends."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.cases import SHAPES, Shape
from bench.suites import speed
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import resolve
from tests.bench.sessions import measured, replace_workers, run_small, saved

GPU_CASES = (("plain", 4), ("plain", 8), ("B", 8), ("RALEARN", 8))
GPU_SHAPE = Shape("small", 2, 2, 16, 8, GPU_CASES, effective=8, plain_micro=4)
Measured = list[tuple[str, int, float]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the suite run on a simulated GPU, with a small shape."""
    resolved = dataclasses.replace(resolve.resolve(ANY_TARGET), device="cuda:0")
    monkeypatch.setattr(resolve, "resolve", lambda config: resolved)
    monkeypatch.setitem(SHAPES, "card", (GPU_SHAPE,))


def record_measurements(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Measured], None] = lambda found: None
) -> Measured:
    """Replace measurements by constants, each after a call of `before`. Returns the list of measurements."""
    found: Measured = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        found.append((case, micro, seconds))
        before(found)
        return measured(100.0)

    replace_workers(monkeypatch, measure)
    return found


def test_a_killed_bench_has_saved_every_round_but_the_last(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(turns: Measured) -> None:
        if len(turns) == 2 * len(GPU_CASES) + 3:
            raise KeyboardInterrupt

    record_measurements(monkeypatch, killed)
    with pytest.raises(KeyboardInterrupt):
        run_small(speed.SUITE, tmp_path, monkeypatch)
    found = saved(speed.SUITE)
    (stage,) = found["stages"]
    assert found["complete"] is False
    assert [(sample["case"], sample["micro"], sample["round"]) for sample in stage["samples"]] == [
        (*case, number) for number in (0, 1) for case in GPU_CASES
    ]
    assert [(row["case"], row["micro"]) for row in stage["rows"]] == list(GPU_CASES)


def test_a_finished_bench_is_complete_and_explains_its_ratios(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete: list[bool] = []

    def look(turns: Measured) -> None:
        if len(turns) > len(GPU_CASES):
            complete.append(saved(speed.SUITE)["complete"])

    turns = record_measurements(monkeypatch, look)
    found = run_small(speed.SUITE, tmp_path, monkeypatch)
    (stage,) = found["stages"]
    rounds, seconds = speed.SUITE.rounds["card"], speed.SUITE.seconds["card"]
    assert turns == [(*case, seconds) for _ in range(rounds) for case in GPU_CASES]
    assert set(complete) == {False}
    assert found["complete"] is True
    assert (stage["shape"]["name"], stage["shape"]["effective"]) == ("small", 8)
    assert stage["skipped"] == []
    shown = capsys.readouterr().out
    assert "8 sequences in an optimizer step" in shown
    assert "4 x 2" in shown
    assert "default micro-batch (4 in small)" in shown
    assert "blocks of 8, with one synchronisation" in shown
    assert shown.count("written: ") == 1
