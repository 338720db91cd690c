"""The growth suite: a power that distinguishes straight growth from a square law, and a run on small models."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import runner
from bench.cases import Shape
from bench.suites import growth
from tests.bench.sessions import run_small


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


@pytest.mark.usefixtures("workers_here")
def test_the_suite_measures_small_models_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Shape("2x16-t8", 2, 2, 16, 8, (("B", 1), ("RALEARN", 1)))
    monkeypatch.setitem(growth.SERIES, "cpu", {"T": [tiny]})
    monkeypatch.setattr(runner, "exact_peak", lambda shape, case, micro: 2**20)
    found = run_small(growth.SUITE, tmp_path, monkeypatch, shape="T", rounds=1, seconds=0)
    (stage,) = found["shapes"]
    assert [row["case"] for row in stage["rows"]] == ["B", "RALEARN"]
    learn = stage["rows"][1]
    assert learn["to_baseline"]["median"] > 0
    assert re.search(r"2x16-t8 +RALEARN .* 1 .*\] +1.000$", capsys.readouterr().out, re.MULTILINE)
