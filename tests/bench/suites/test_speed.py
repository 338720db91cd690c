"""The speed suite: stages, tables, and the suite itself on a simulated GPU."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cases import SHAPES, Shape
from bench.runner import CaseTiming, rows_of
from bench.suites import speed
from bench.workers import BenchError
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import resolve
from gpt2.system.errors import UserError
from tests.bench.sessions import SHAPE, measured, replace_workers, run_small, saved


@pytest.mark.parametrize(
    ("effective", "each", "batch"), [(0, "one micro-batch", "4 x 1"), (8, "8 sequences", "4 x 2")]
)
def test_the_table_states_the_step_and_the_ratios(effective: int, each: str, batch: str) -> None:
    shape = replace(SHAPE, effective=effective)
    speeds = {"plain": 100.0, "B": 150.0, "RALEARN": 120.0}
    samples = [CaseTiming(case, micro, 0, **measured(speeds[case])) for case, micro in shape.cases]
    (stage,) = speed.stages(shape, False, 3, 1.0, None)
    shown = str(speed.table(stage, rows_of(shape, samples, None)))
    assert "1.50 [1.50, 1.50]" in shown
    assert f"{each} in an optimizer step" in shown
    assert batch in shown


def test_on_a_cpu_the_plain_case_is_compared_in_new_workers_and_the_variants_in_persistent_ones() -> None:
    enough = 3 * speed.worker_bytes(SHAPE)
    for free in (None, enough):
        alone, held = speed.stages(SHAPE, True, 2, 3.0, free)
        assert alone.shape.cases == (("plain", 4), ("B", 4), ("B", 8))
        assert held.shape.cases == (("B", 4), ("RALEARN", 4), ("B", 8))
        assert (alone.rounds, alone.seconds, held.rounds, held.seconds) == (2, 3.0, 6, 0.0)
        assert (alone.persistent, held.persistent) == (False, True)
    for stage in speed.stages(SHAPE, True, 2, 3.0, enough - 1):  # too little memory to hold them all
        assert not stage.persistent
        assert (stage.rounds, stage.seconds) == (2, 3.0)
    (all_at_once,) = speed.stages(SHAPE, False, 2, 3.0, None)
    assert all_at_once.shape == SHAPE


def test_a_stage_without_cases_is_skipped() -> None:
    for cases, persistent in (((("plain", 4),), False), ((("RALEARN", 4),), True)):
        found = speed.stages(replace(SHAPE, cases=cases), True, 2, 3.0, None)
        assert [stage.persistent for stage in found] == [persistent]


def test_the_estimated_memory_of_a_worker_is_at_least_the_measured_one() -> None:
    """GPT-2 124M at 2 x 256 tokens took 2.3 GiB in a worker. Six fit in 16 GiB, not in 12."""
    shape = next(shape for shape in SHAPES["cpu"] if shape.name == "124m-t256")
    assert 2.3 <= speed.worker_bytes(shape) / 2**30 <= 3.5


# --- the suite

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


def test_only_the_given_cases_are_measured(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = record_measurements(monkeypatch)
    run_small(speed.SUITE, tmp_path, monkeypatch, cases="RALEARN plain@8", rounds=2, seconds=1)
    assert turns == [("plain", 8, 1.0), ("RALEARN", 8, 1.0)] * 2


def test_an_unknown_case_is_refused_before_anything_is_measured(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = record_measurements(monkeypatch)
    with pytest.raises(UserError, match="unknown case 'XB'; cases: plain"):
        run_small(speed.SUITE, tmp_path, monkeypatch, cases="B XB")
    assert not turns
    assert not [*tmp_path.rglob("*.json")]


def test_a_bench_without_measurements_fails_and_saves_the_reasons(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(turns: Measured) -> None:
        raise BenchError(f"{turns[-1][0]}: out of memory")

    turns = record_measurements(monkeypatch, fail)
    with pytest.raises(UserError, match="no case could be measured"):
        run_small(speed.SUITE, tmp_path, monkeypatch)
    assert len(turns) == len(GPU_CASES)
    found = saved(speed.SUITE)
    (stage,) = found["stages"]
    assert found["complete"] is False
    assert stage["skipped"] == [f"{case}: out of memory" for case, _ in GPU_CASES]
    assert "skipped: RALEARN: out of memory" in capsys.readouterr().out
