"""Rounds, ratios, skipped cases, and the workers of a stage."""

import dataclasses
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import runner, suite
from bench.cases import Shape
from bench.runner import CaseTiming, Stage, measure_stage, open_workers, rows_of
from bench.suite import SuiteSession
from bench.workers import BenchError, BenchWorker
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import resolve
from tests.bench import worker_calls
from tests.bench.sessions import SHAPE, measured, replace_workers

SPREAD = ("median", "low", "high", "least", "most")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteSession:
    """A session on a simulated GPU of 1e5 FLOP/s."""
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    resolved = resolve.resolve(ANY_TARGET)
    target = dataclasses.replace(resolved.target, peak_flops=1e5)
    return SuiteSession("speed", dataclasses.replace(resolved, device="cuda:0", target=target))


def test_the_cases_take_turns_and_drift_of_the_machine_cancels_in_the_ratios(
    session: SuiteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []

    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        drift = 1.0 + 0.5 * (len(order) // len(SHAPE.cases))  # each round on a faster machine
        order.append((case, micro))
        speed = {"plain": 100, "B": 150, "RALEARN": 120}[case]
        return measured(drift * speed, peak_bytes=speed)

    replace_workers(monkeypatch, measure)
    found = measure_stage(Stage(SHAPE, 3, 1.0), session, {})
    assert order == list(SHAPE.cases) * 3
    rows = {(row["case"], row["micro"]): row for row in found}
    assert rows["B", 4]["to_plain"] == pytest.approx(dict.fromkeys(SPREAD, 1.5))
    assert rows["RALEARN", 4]["to_baseline"] == pytest.approx(dict.fromkeys(SPREAD, 0.8))
    assert rows["plain", 4]["to_baseline"] is rows["B", 4]["to_baseline"] is None
    assert rows["B", 8]["to_plain_same_micro"] is None
    assert rows["B", 4]["memory_to_plain_same_micro"] == pytest.approx(1.5)
    assert rows["RALEARN", 4]["memory_to_baseline"] == pytest.approx(0.8)
    assert rows["B", 4]["mfu"] == pytest.approx(225 * 100 / 1e5)
    assert rows["B", 4]["mfu_nanogpt"] == pytest.approx(225 * 110 / 1e5)


def test_a_case_that_cannot_run_is_reported_once_and_skipped_and_every_round_is_saved(
    session: SuiteSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        if micro == 8:
            raise BenchError("out of memory")
        return measured(100.0)

    saves: list[tuple[int, list[str]]] = []

    def save(session: SuiteSession, data: Any) -> None:
        (stage,) = data["stages"]
        saves.append((len(stage["samples"]), stage["skipped"]))

    replace_workers(monkeypatch, measure)
    monkeypatch.setattr(SuiteSession, "save", save)
    rows = measure_stage(Stage(SHAPE, 2, 1.0), session, {})
    assert [(row["case"], row["micro"]) for row in rows] == [("plain", 4), ("B", 4), ("RALEARN", 4)]
    assert saves == [(3, ["out of memory"]), (6, ["out of memory"])]
    assert capsys.readouterr().out.count("skipped: out of memory") == 1


def test_on_a_cpu_the_peak_is_measured_in_a_separate_process(
    session: SuiteSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_workers(monkeypatch, lambda *key: measured(100.0, peak_bytes=7))
    on_gpu = measure_stage(Stage(SHAPE, 1, 1.0), session, {})
    on_cpu = replace(session, resolved=resolve.resolve(ANY_TARGET))
    assert {row["peak_bytes"] for row in on_gpu} == {7}
    assert {row["peak_bytes"] for row in measure_stage(Stage(SHAPE, 1, 1.0), on_cpu, {})} == {9}


def test_a_ratio_to_plain_is_to_its_default_micro_batch_and_to_no_other() -> None:
    speeds = {("plain", 12): 100.0, ("plain", 8): 80.0, ("B", 8): 120.0}

    def row_of_b(*cases: tuple[str, int]) -> dict[str, Any]:
        shape = replace(SHAPE, cases=cases, effective=24, plain_micro=12)
        samples = [CaseTiming(*case, 0, **measured(speeds[case])) for case in cases]
        return next(row for row in rows_of(shape, samples, None) if row["case"] == "B")

    both = row_of_b(("plain", 8), ("plain", 12), ("B", 8))
    assert both["to_plain"]["median"] == pytest.approx(1.2)
    assert both["to_plain_same_micro"]["median"] == pytest.approx(1.5)
    assert both["accumulation"] == 3
    one = row_of_b(("plain", 8), ("B", 8))
    assert one["to_plain"] is None
    assert one["to_plain_same_micro"]["median"] == pytest.approx(1.5)


# --- workers


@pytest.mark.parametrize("persistent", [True, False])
def test_the_workers_of_a_stage_are_persistent_or_new_and_end_with_it(
    persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "time_case", worker_calls.process_of_case)
    with open_workers(persistent) as measure:
        turns = [measure(SHAPE, case, 4, 0.0)["process"] for case in ("B", "RALEARN") * 2]
    assert len(set(turns)) == (2 if persistent else 4)
    assert (turns[:2] == turns[2:]) is persistent
    for process in turns:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def measured_twice(case: str) -> list[dict[str, Any]]:
    with open_workers(persistent=True) as measure:
        found = [measure(SHAPE, case, 4, 0.0) for _ in range(2)]
    for turn in found:
        assert turn["tokens_per_second"] == pytest.approx(4 * 8 / turn["step_seconds"])
    return found


def test_a_case_is_measured_in_a_process() -> None:
    assert all(turn["peak_bytes"] > 0 for turn in measured_twice("RALEARN:hard:8"))


@pytest.mark.usefixtures("workers_here")
def test_the_plain_case_is_measured() -> None:
    assert all(turn["step_seconds"] > 0 for turn in measured_twice("plain"))


def test_a_case_that_fails_in_its_worker_gives_the_exception() -> None:
    with (
        pytest.raises(BenchError, match=r"small, XB at micro-batch 4: .*XB"),
        open_workers(persistent=True) as measure,
    ):
        measure(SHAPE, "XB", 4, 0.0)


def test_the_time_limit_grows_with_the_seconds_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(BenchWorker, "call", lambda *_, limit_seconds: limits.append(limit_seconds))
    with open_workers(persistent=True) as measure:
        for seconds in (0.0, 12.0):
            measure(SHAPE, "B", 4, seconds)
    assert limits == [runner.LIMIT_SECONDS, runner.LIMIT_SECONDS + 12 * runner.SLOWER]


def test_a_peak_is_measured_in_a_process_and_grows_with_the_text() -> None:
    short, long = (runner.exact_peak(Shape(f"{T}", 2, 2, 32, T, ()), "B", 1) for T in (16, 256))
    assert 0 < short < long
