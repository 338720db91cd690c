"""The sampling suite: its arithmetic, and a run on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.suites import sampling
from bench.suites.sampling import SUITE, SampledShape, rows_of, table
from tests.bench.sessions import run_small


def a_turn(cached: bool, rate: float, tokens: list[int]) -> dict[str, object]:
    return {
        "case": "B",
        "cached": cached,
        "texts": 8,
        "seconds": 1.0,
        "tokens_per_second": rate,
        "tokens": tokens,
    }


def test_ratios_are_taken_within_a_round_and_other_tokens_are_named() -> None:
    turns = [
        a_turn(True, 40.0, [1]),
        a_turn(False, 10.0, [1]),
        a_turn(True, 90.0, [2]),
        a_turn(False, 30.0, [1]),
    ]
    (row,) = rows_of(turns)
    assert row["ratio"]["least"] == 3.0
    assert row["ratio"]["most"] == 4.0
    assert not row["equal"]
    (row,) = rows_of(turns[:2])
    assert row["equal"]


@pytest.mark.usefixtures("workers_here")
def test_the_suite_draws_equal_tokens_with_and_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = SampledShape("tiny", 1, 1, 8, 64, prompt=3, new=4)
    monkeypatch.setattr(sampling, "SHAPES", {"cpu": (tiny,)})
    data = run_small(SUITE, tmp_path, monkeypatch, rounds=1)
    (result,) = data["shapes"]
    rows = rows_of(result["turns"])
    assert [(row["case"], row["texts"]) for row in rows] == [
        (case, texts) for case in ("B", "RAALL", "RALEARN") for texts in (1, 8)
    ]
    assert all(row["equal"] for row in rows)
    assert "tokens/s, no cache" in str(table(result))
