"""The corpus suite on small corpora, prepared in workers."""

import re
from pathlib import Path

import pytest

from bench.suites import corpus
from bench.workers import Worker
from gpt2.system.errors import UserError
from tests.bench.sessions import run_small


def test_both_sizes_are_prepared_and_their_peaks_compared(tmp_path: Path) -> None:
    rows = corpus.measure(tmp_path, 200_000)
    assert [row["source"] for row in rows] == ["many .txt", "many .txt", "one .jsonl", "one .jsonl"]
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        assert 3.5 < large["bytes"] / small["bytes"] < 4.5
        assert large["tokens"] > 3 * small["tokens"]
        assert small["parent_bytes"] > 0
        assert small["worker_bytes"] == 0  # so little text needs no pool
    shown = str(corpus.table(rows))
    assert re.search(r"many .txt +1 +[\d.]+ +[\d.]+ +\d+ +-$", shown, re.MULTILINE)
    assert "too little text for a pool" in shown


def test_the_texts_are_the_same_at_every_run(tmp_path: Path) -> None:
    for name in ("one", "two"):
        corpus.write_texts(tmp_path / name, 100_000, lines=True)
    one, two = ((tmp_path / name / "all.jsonl").read_bytes() for name in ("one", "two"))
    assert one == two


def test_the_peak_of_a_process_excludes_that_of_its_parent() -> None:
    large = b"x" * (400 * 2**20)
    assert corpus.peak_of_this_process() > len(large)
    with Worker("a worker") as worker:
        assert worker.call(corpus.peak_of_this_process) < len(large)


def test_a_size_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="SHAPE=much is not a number of megabytes; fix: SHAPE=16"):
        run_small(corpus.SUITE, tmp_path, monkeypatch, shape="much")
