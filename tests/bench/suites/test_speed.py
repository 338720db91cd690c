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
