"""The speed suite: stages, rows and ratios, and the suite itself on a simulated GPU."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import workers
from bench.cases import SHAPES, Shape
from bench.runner import interleaved_rounds, open_workers
from bench.suites import speed
from bench.workers import BenchError, PersistentWorkers
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import resolve
from gpt2.system.errors import UserError
from tests.bench.sessions import run_small, saved

SHAPE = Shape("small", 2, 2, 16, 8, (("plain", 4), ("B", 4), ("RALEARN", 4), ("B", 8)), plain_micro=4)
SPREAD = ("median", "low", "high", "least", "most")


def answer(speed: float) -> dict[str, Any]:
    return {
        "step_seconds": 1.0,
        "tokens_per_second": speed,
        "peak_bytes": int(speed) * 2**20,
        "flops_per_token": 100.0,
        "nanogpt_flops_per_token": 110.0,
    }


def test_the_cases_take_turns_and_drift_of_the_machine_cancels_in_the_ratios() -> None:
    order = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        drift = 1.0 + 0.5 * (len(order) // len(SHAPE.cases))  # each round on a faster machine
        order.append((case, micro))
        return answer(drift * {"plain": 100, "B": 150, "RALEARN": 120}[case])

    samples = interleaved_rounds(SHAPE, 3, 1.0, lambda line: None, measure)
    assert order == list(SHAPE.cases) * 3
    rows = {(row["case"], row["micro"]): row for row in speed.rows_of(SHAPE, samples, 1e5)}
    assert rows["B", 4]["to_plain"] == pytest.approx(dict.fromkeys(SPREAD, 1.5))
    assert rows["RALEARN", 4]["to_baseline"] == pytest.approx(dict.fromkeys(SPREAD, 0.8))
    assert rows["B", 8]["to_plain_same_micro"] is None
    assert rows["B", 4]["memory_to_plain_same_micro"] == pytest.approx(1.5)
    assert rows["B", 4]["mfu"] == pytest.approx(225 * 100 / 1e5)
    (stage,) = speed.stages(SHAPE, False, 3, 1.0, None)
    shown = str(speed.table(stage, list(rows.values())))
    assert "1.50 [1.50, 1.50]" in shown
    assert "one micro-batch in an optimizer step" in shown
    assert "4 x 1" in shown


def test_a_case_that_cannot_run_is_reported_and_skipped() -> None:
    said: list[str] = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        if micro == 8:
            raise BenchError("out of memory")
        return answer(100)

    saves: list[tuple[int, list[str]]] = []
    samples = interleaved_rounds(
        SHAPE, 2, 1.0, said.append, measure, lambda samples, reasons: saves.append((len(samples), reasons))
    )
    assert {(sample.case, sample.micro) for sample in samples} == {("plain", 4), ("B", 4), ("RALEARN", 4)}
    assert sum("skipped: out of memory" in line for line in said) == 1
    assert saves == [(3, ["out of memory"]), (6, ["out of memory"])]


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


def test_the_workers_of_a_stage_are_persistent_or_new() -> None:
    with open_workers(persistent=False) as measure:
        assert measure is workers.measure_in_new_worker
    with open_workers(persistent=True) as measure:
        assert isinstance(measure, PersistentWorkers)


def test_the_estimated_memory_of_a_worker_is_at_least_the_measured_one() -> None:
    """GPT-2 124M at 2 x 256 tokens took 2.3 GiB in a worker. Six fit in 16 GiB, not in 12."""
    shape = next(shape for shape in SHAPES["cpu"] if shape.name == "124m-t256")
    assert 2.3 <= speed.worker_bytes(shape) / 2**30 <= 3.5


def test_a_ratio_to_plain_is_to_its_default_micro_batch_and_to_no_other() -> None:
    def rows(*cases: tuple[str, int]) -> dict[str, Any]:
        shape = replace(SHAPE, cases=cases, effective=24, plain_micro=12)
        speeds = {("plain", 12): 100.0, ("plain", 8): 80.0, ("B", 8): 120.0}
        samples = interleaved_rounds(
            shape, 1, 0.0, lambda line: None, lambda s, case, micro, t: answer(speeds[case, micro])
        )
        found = speed.rows_of(shape, samples, None)
        (stage,) = speed.stages(shape, False, 1, 0.0, None)
        shown = str(speed.table(stage, found))
        assert "24 sequences in an optimizer step" in shown
        assert "8 x 3" in shown
        return next(row for row in found if row["case"] == "B")

    both = rows(("plain", 8), ("plain", 12), ("B", 8))
    assert both["to_plain"]["median"] == pytest.approx(1.2)
    assert both["to_plain_same_micro"]["median"] == pytest.approx(1.5)
    one = rows(("plain", 8), ("B", 8))
    assert one["to_plain"] is None
    assert one["to_plain_same_micro"]["median"] == pytest.approx(1.5)


# --- the suite

GPU_CASES = (("plain", 4), ("plain", 8), ("B", 8), ("RALEARN", 8))
GPU_SHAPE = Shape("small", 2, 2, 16, 8, GPU_CASES, effective=8, plain_micro=4)
Measured = list[tuple[str, int, float]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the suite run on a simulated GPU, with a small shape."""
    resolved = dataclasses.replace(resolve.resolve(ANY_TARGET), device="cuda:0")
    monkeypatch.setattr(resolve, "resolve", lambda config: resolved)
    monkeypatch.setitem(SHAPES, "cuda", (GPU_SHAPE,))


def record_measurements(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Measured], None] = lambda measured: None
) -> Measured:
    """Replace measurements by constants, each after a call of `before`. Returns the list of measurements."""
    measured: Measured = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        measured.append((case, micro, seconds))
        before(measured)
        return answer(100.0)

    monkeypatch.setattr(workers, "measure_in_new_worker", measure)
    return measured


def test_a_killed_bench_has_saved_every_round_but_the_last(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(measured: Measured) -> None:
        if len(measured) == 2 * len(GPU_CASES) + 3:
            raise KeyboardInterrupt

    record_measurements(monkeypatch, killed)
    with pytest.raises(KeyboardInterrupt):
        run_small(speed.SUITE, tmp_path, monkeypatch)
    found = saved(speed.SUITE)
    (stage,) = found["shapes"]["small"]
    assert found["complete"] is False
    assert [(sample["case"], sample["micro"], sample["round"]) for sample in stage["samples"]] == [
        (*case, number) for number in (0, 1) for case in GPU_CASES
    ]
    assert [(row["case"], row["micro"]) for row in stage["rows"]] == list(GPU_CASES)


def test_a_finished_bench_is_complete_and_explains_its_ratios(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete: list[bool] = []

    def look(measured: Measured) -> None:
        if len(measured) > len(GPU_CASES):
            complete.append(saved(speed.SUITE)["complete"])

    measured = record_measurements(monkeypatch, look)
    found = run_small(speed.SUITE, tmp_path, monkeypatch)
    (stage,) = found["shapes"]["small"]
    rounds, seconds = speed.SUITE.rounds["cuda"], speed.SUITE.seconds["cuda"]
    assert measured == [(*case, seconds) for _ in range(rounds) for case in GPU_CASES]
    assert set(complete) == {False}
    assert found["complete"] is True
    assert stage["sequences_a_step"] == 8
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
    measured = record_measurements(monkeypatch)
    run_small(speed.SUITE, tmp_path, monkeypatch, cases="RALEARN plain@8", rounds=2, seconds=1)
    assert measured == [("plain", 8, 1.0), ("RALEARN", 8, 1.0)] * 2


def test_an_unknown_case_is_refused_before_anything_is_measured(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = record_measurements(monkeypatch)
    with pytest.raises(UserError, match="unknown case 'XB'; cases: plain"):
        run_small(speed.SUITE, tmp_path, monkeypatch, cases="B XB")
    assert not measured
    assert not [*tmp_path.rglob("*.json")]


def test_a_bench_without_measurements_fails_and_saves_the_reasons(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(measured: Measured) -> None:
        raise BenchError(f"{measured[-1][0]}: out of memory")

    measured = record_measurements(monkeypatch, fail)
    with pytest.raises(UserError, match="no case could be measured"):
        run_small(speed.SUITE, tmp_path, monkeypatch)
    assert len(measured) == len(GPU_CASES)
    found = saved(speed.SUITE)
    (stage,) = found["shapes"]["small"]
    assert found["complete"] is False
    assert stage["skipped"] == [f"{case}: out of memory" for case, _ in GPU_CASES]
    assert "skipped: RALEARN: out of memory" in capsys.readouterr().out
