"""Growth of cost: its series, its ratios, and a power that distinguishes straight growth from a square law."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import runner
from bench.cases import Shape
from bench.suites import growth
from bench.workers import BenchError
from gpt2.config.config import ANY_TARGET
from gpt2.hardware import resolve
from gpt2.system.errors import UserError
from tests.bench.sessions import measured, replace_workers, run_small, saved

CASES = tuple((name, 2) for name in growth.VARIANTS)
LENGTHS = (16, 32, 64)
SLOWER = {"B": 1.0, "RAALL": 1.0, "RALEARN": 1.25}


def measure(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
    """A case that needs 10 MiB, and 1 MiB for each of T."""
    step = shape.block_size * SLOWER[case]
    peak = int(2**20 * (10 + shape.block_size * SLOWER[case]))
    return measured(micro * shape.block_size / step, step, peak)


def notes_of(points: list[tuple[int, float]]) -> list[str]:
    return growth.growth_of_peaks([{"case": "B", "block_size": T, "peak_bytes": peak} for T, peak in points])


@given(st.floats(1e6, 1e9), st.floats(1e3, 1e6))
def test_linear_growth_has_an_exponent_of_at_most_1_and_quadratic_growth_of_2(
    start: float, slope: float
) -> None:
    (straight,) = notes_of([(T, start + slope * T) for T in growth.LENGTHS])
    found = re.fullmatch(
        r"peak of B from T = 2048 to 4096: ([\d.,]+) KiB for each of T; .* T\^([\d.]+)", straight
    )
    assert found
    assert float(found[1].replace(",", "")) == pytest.approx(slope / 2**10, abs=0.051)
    assert float(found[2]) <= 1.0
    (square,) = notes_of([(T, slope * T * T) for T in growth.LENGTHS])
    assert square.endswith("T^2.00")


def test_a_single_length_shows_no_growth() -> None:
    assert notes_of([(8, 1.0)]) == []


@pytest.mark.parametrize("kind", ["cpu", "card"])
def test_a_series_varies_one_thing_and_fits_its_heads(kind: str) -> None:
    lengths, sizes = growth.SERIES[kind]["T"], growth.SERIES[kind]["size"]
    assert [shape.block_size for shape in lengths] == [256, 512, 1024, 2048, 4096]
    assert len({(shape.layers, shape.width, shape.cases) for shape in lengths}) == 1
    assert len({(shape.block_size, shape.cases) for shape in sizes}) == 1
    assert all(shape.width == shape.heads * growth.HEAD_SIZE for shape in (*lengths, *sizes))


# --- the suite


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the suite run on a simulated GPU, with two small series."""
    resolved = dataclasses.replace(resolve.resolve(ANY_TARGET), device="cuda:0")
    monkeypatch.setattr(resolve, "resolve", lambda config: resolved)
    shapes = [Shape(f"2x16-t{T}", 2, 2, 16, T, CASES) for T in LENGTHS]
    monkeypatch.setitem(growth.SERIES, "card", {"T": shapes, "size": [Shape("size", 2, 2, 16, 8, CASES)]})


def test_both_series_are_printed_and_saved_with_their_ratios(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_workers(monkeypatch, measure)
    found = run_small(growth.SUITE, tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert found["complete"] is True
    assert [stage["shape"]["name"] for stage in found["stages"]] == [
        "2x16-t16",
        "2x16-t32",
        "2x16-t64",
        "size",
    ]
    learn = next(row for row in found["stages"][1]["rows"] if row["case"] == "RALEARN")
    assert learn["to_baseline"]["median"] == pytest.approx(0.8)
    assert learn["memory_to_baseline"] == pytest.approx(50 / 42)
    assert re.search(r"2x16-t32 +RALEARN +2 +40,000.0 +50 +0.800 \[0.800, 0.800\] +1.190", shown)
    assert "peak of RALEARN from T = 32 to 64: 1,280.0 KiB for each of T; it grows as T^0.85" in shown
    assert "cost by T" in shown
    assert "cost by size" in shown


def test_a_case_that_fails_does_not_affect_the_others(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(shape: Shape, case: str, micro: int, seconds: float) -> dict[str, Any]:
        if case == "RALEARN" and shape.block_size >= 64:
            raise BenchError("out of memory")
        return measure(shape, case, micro, seconds)

    replace_workers(monkeypatch, fails)
    found = run_small(growth.SUITE, tmp_path, monkeypatch, shape="T")
    assert [len(stage["rows"]) for stage in found["stages"]] == [3, 3, 2]
    assert "peak of RALEARN from T = 16 to 32" in capsys.readouterr().out


def test_every_round_is_saved(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def killed(*arguments: Any) -> dict[str, Any]:
        turns.append(arguments)
        if len(turns) > 5 * len(CASES):  # in the third round of the second length
            raise KeyboardInterrupt
        return measure(*arguments)

    replace_workers(monkeypatch, killed)
    with pytest.raises(KeyboardInterrupt):
        run_small(growth.SUITE, tmp_path, monkeypatch)
    assert saved(growth.SUITE)["complete"] is False
    samples = [stage["samples"] for stage in saved(growth.SUITE)["stages"]]
    assert [len(stage) for stage in samples] == [3 * len(CASES), 2 * len(CASES)]


def test_where_no_case_can_be_measured_the_suite_fails(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> dict[str, Any]:
        raise BenchError("out of memory")

    replace_workers(monkeypatch, fails)
    with pytest.raises(UserError, match="no case could be measured"):
        run_small(growth.SUITE, tmp_path, monkeypatch)


@pytest.mark.usefixtures("workers_here")
def test_the_suite_measures_small_models_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Shape("2x16-t8", 2, 2, 16, 8, (("B", 1), ("RALEARN", 1)))
    monkeypatch.setitem(growth.SERIES, "cpu", {"T": [tiny]})
    monkeypatch.setattr(runner, "exact_peak", lambda shape, case, micro: 2**20)
    found = run_small(growth.SUITE, tmp_path, monkeypatch, shape="T", rounds=1, seconds=0)
    (stage,) = found["stages"]
    assert stage["persistent"] is True
    assert [row["case"] for row in stage["rows"]] == ["B", "RALEARN"]
    learn = stage["rows"][1]
    assert learn["to_baseline"]["median"] > 0
    assert re.search(r"2x16-t8 +RALEARN .* 1 .*\] +1.000$", capsys.readouterr().out, re.MULTILINE)


def test_an_unknown_part_is_an_error_with_the_existing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="unknown part SHAPE=none; parts: T, size"):
        run_small(growth.SUITE, tmp_path, monkeypatch, shape="none")
