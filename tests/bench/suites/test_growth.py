"""Growth of cost: ratios within rounds, and a power that distinguishes straight growth from a square law."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import workers
from bench.cases import Shape
from bench.suite import Options
from bench.suites import growth
from bench.workers import BenchError
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import resolve
from gpt2.system.errors import UserError
from tests.bench.sessions import run_small, saved

LENGTHS = (8, 16, 32, 64)
CASES = tuple((name, 2) for name in growth.VARIANTS)
SERIES = growth.Series("T", "tiny", tuple(Shape(f"{T}", 2, 2, 16, T, CASES) for T in LENGTHS))
SLOWER = {"B": 1.0, "RAALL": 1.0, "RALEARN": 1.25}


def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
    step = shape.block_size * SLOWER[case]
    return {
        "step_seconds": step,
        "tokens_per_second": micro * shape.block_size / step,
        "peak_bytes": 7,
        "flops_per_token": 1.0,
        "nanogpt_flops_per_token": 1.0,
    }


def peak(shape: Shape, case: str, micro: int) -> int:
    return int(2**20 * (10 + shape.block_size * SLOWER[case]))


def test_costs_are_ratios_to_the_baseline_and_peaks_come_from_their_separate_measure() -> None:
    found = growth.measure_series(
        SERIES, Options(rounds=2), lambda line: None, lambda: nullcontext(measure), peak
    )
    rows = growth.rows_of(SERIES, found)
    assert [(row["T"], row["case"]) for row in rows] == [
        (T, name) for T in LENGTHS for name in growth.VARIANTS
    ]
    learn = next(row for row in rows if (row["T"], row["case"]) == (32, "RALEARN"))
    assert learn["time_to_baseline"] == pytest.approx(
        dict.fromkeys(("median", "low", "high", "least", "most"), 1.25)
    )
    assert learn["memory_to_baseline"] == pytest.approx(50 / 42)
    assert learn["peak_bytes"] == 50 * 2**20
    found_growth = growth.growth_by_case(rows)
    assert found_growth["RALEARN"]["bytes_per_token"] == pytest.approx(1.25 * 2**20)
    shown = str(growth.table(SERIES, rows, found_growth))
    assert "1.250 [1.250, 1.250]" in shown
    assert "peak of RALEARN from T = 32 to 64: 1,280.0 KiB for each of T; it grows as T^0.85" in shown


def test_without_a_separate_measure_the_peak_is_that_of_the_timed_process() -> None:
    rows = growth.rows_of(
        SERIES,
        growth.measure_series(SERIES, Options(rounds=1), lambda line: None, lambda: nullcontext(measure)),
    )
    assert {row["peak_bytes"] for row in rows} == {7}


def test_a_case_that_fails_does_not_affect_the_others() -> None:
    def fails(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        if case == "RALEARN" and shape.block_size >= 32:
            raise BenchError("out of memory")
        return measure(shape, case, micro, seconds)

    rows = growth.rows_of(
        SERIES,
        growth.measure_series(SERIES, Options(rounds=1), lambda line: None, lambda: nullcontext(fails), peak),
    )
    assert len(rows) == 10
    assert growth.growth_by_case(rows)["RALEARN"]["to"] == 16


@given(st.floats(1e6, 1e9), st.floats(1e3, 1e6))
def test_linear_growth_has_an_exponent_of_at_most_1_and_quadratic_growth_of_2(
    start: float, slope: float
) -> None:
    straight = growth.peak_growth([(T, start + slope * T) for T in growth.LENGTHS])
    assert straight
    assert straight["power"] <= 1.0
    assert straight["bytes_per_token"] == pytest.approx(slope, rel=1e-3)
    square = growth.peak_growth([(T, slope * T * T) for T in growth.LENGTHS])
    assert square
    assert square["power"] == pytest.approx(2.0)


def test_a_single_length_shows_no_growth() -> None:
    assert growth.peak_growth([(8, 1.0)]) is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_series_varies_one_thing_and_fits_its_heads(kind: str) -> None:
    lengths, sizes = growth.SERIES[kind]
    assert [shape.block_size for shape in lengths.shapes] == [256, 512, 1024, 2048, 4096]
    assert len({(shape.layers, shape.width, shape.cases) for shape in lengths.shapes}) == 1
    assert len({(shape.block_size, shape.cases) for shape in sizes.shapes}) == 1
    assert all(shape.width == shape.heads * growth.HEAD_SIZE for shape in (*lengths.shapes, *sizes.shapes))


def test_a_peak_is_measured_in_a_process_and_grows_with_the_text() -> None:
    short, long = (growth.measure_peak(Shape(f"{T}", 2, 2, 32, T, ()), "RALEARN", 1) for T in (64, 512))
    assert 0 < short < long


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the suite run on a simulated GPU, with two small series."""
    resolved = dataclasses.replace(resolve.resolve(ANY_TARGET), device="cuda:0")
    monkeypatch.setattr(resolve, "resolve", lambda config: resolved)
    size = growth.Series("size", "tiny", (Shape("2x16", 2, 2, 16, 8, CASES),))
    monkeypatch.setitem(growth.SERIES, "cuda", (SERIES, size))


def test_the_suite_saves_the_numbers_that_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = growth.Series("T", "tiny", (Shape("8", 2, 2, 16, 8, (("B", 1), ("RALEARN", 1))),))
    monkeypatch.setitem(growth.SERIES, "cpu", (tiny,))
    monkeypatch.setattr(growth, "measure_peak", peak)
    found = run_small(growth.SUITE, tmp_path, monkeypatch, shape="T", rounds=1, seconds=0)
    shown = capsys.readouterr().out
    rows = found["T"]["rows"]
    assert [(row["T"], row["case"]) for row in rows] == [(8, "B"), (8, "RALEARN")]
    assert rows[1]["time_to_baseline"]["median"] > 0
    assert f"{rows[1]['memory_to_baseline']:.3f}" in shown
    assert found["memory"] in shown
    assert found["complete"] is True


def test_a_series_is_saved_before_the_next_one_is_measured(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        if shape.name == "2x16":
            found = saved(growth.SUITE)
            assert found["complete"] is False
            assert len(found["T"]["rows"]) == len(LENGTHS) * len(CASES)
            raise KeyboardInterrupt
        return measure(shape, case, micro, seconds)

    monkeypatch.setattr(workers, "measure_in_new_worker", killed)
    with pytest.raises(KeyboardInterrupt):
        run_small(growth.SUITE, tmp_path, monkeypatch)
    assert saved(growth.SUITE)["complete"] is False


def test_both_series_are_in_the_file_at_the_end(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "measure_in_new_worker", measure)
    found = run_small(growth.SUITE, tmp_path, monkeypatch)
    assert found["complete"] is True
    assert len(found["T"]["rows"]) == len(LENGTHS) * len(CASES)
    assert len(found["size"]["rows"]) == len(CASES)


def test_on_a_gpu_every_round_is_saved(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def killed(*arguments: Any) -> dict[str, Any]:
        measured.append(arguments)
        if len(measured) > 5 * len(CASES):  # in the third round of the second length
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(workers, "measure_in_new_worker", killed)
    with pytest.raises(KeyboardInterrupt):
        run_small(growth.SUITE, tmp_path, monkeypatch)
    samples = saved(growth.SUITE)["T"]["samples"]
    assert {name: len(own) for name, own in samples.items()} == {"8": 3 * len(CASES), "16": 2 * len(CASES)}


def test_where_no_case_can_be_timed_the_suite_fails(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> dict[str, Any]:
        raise BenchError("out of memory")

    monkeypatch.setattr(workers, "measure_in_new_worker", fails)
    with pytest.raises(UserError, match="no case could be timed"):
        run_small(growth.SUITE, tmp_path, monkeypatch)


def test_a_case_without_a_peak_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(shape: Shape, case: str, micro: int) -> int:
        if case == "RAALL":
            raise BenchError("out of memory")
        return peak(shape, case, micro)

    said: list[str] = []
    saved_shapes: list[int] = []
    found = growth.measure_series(
        SERIES,
        Options(rounds=2),
        said.append,
        lambda: nullcontext(measure),
        fails,
        lambda found: saved_shapes.append(len(found)),
    )
    assert {row["case"] for row in growth.rows_of(SERIES, found)} == {"B", "RALEARN"}
    assert "skipped: out of memory" in said
    assert saved_shapes == [1, 2, 3, 4]  # a shape at a time: before its end its peaks are not known


def test_an_unknown_part_is_an_error_with_the_existing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="unknown part SHAPE=none; parts: T, size"):
        run_small(growth.SUITE, tmp_path, monkeypatch, shape="none")
