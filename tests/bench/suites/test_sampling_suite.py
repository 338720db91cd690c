"""The sampling suite: a run on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.suites import sampling
from bench.suites.sampling import SUITE, SampledShape, rows_of, table
from tests.bench.sessions import run_small


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
