"""The quick rows of `make faults` as tests, and the summary of the table."""

import contextlib
from types import SimpleNamespace
from typing import cast

import pytest

from tests.faults import (  # noqa: F401  (they fill the table)
    clusters,
    damaged,
    data,
    failures,
    ranks,
    seed_demands,
    signals,
    storage,
    surroundings,
)
from tests.faults.__main__ import main
from tests.faults.harness import TABLE, Bench, CannotDoError, Fault

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"), in_process=True)


@pytest.mark.parametrize("row", [row for row in TABLE if row.quick], ids=lambda row: row.name)
def test_a_fault_has_its_expected_outcome(bench: Bench, row: Fault) -> None:
    try:
        assert row.inflict(bench) == row.expected
    except CannotDoError as reason:
        pytest.skip(str(reason))


def test_the_table_has_at_least_25_distinct_faults() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE) >= 25


def cannot(bench: Bench) -> str:
    raise CannotDoError("no such thing here")


def breaks(bench: Bench) -> str:
    raise OSError("broken")


ROWS = {
    "good": Fault("good", "x", lambda bench: "x", False),
    "bad": Fault("bad", "x", lambda bench: "y", False),
    "breaks": Fault("breaks", "x", breaks, False),
    "cannot": Fault("cannot", "x", cannot, False),
}


@pytest.mark.parametrize(
    ("rows", "status", "total"),
    [
        (["good", "good"], 0, "2 rows: 2 as expected, 0 OTHERWISE, 0 not done here"),
        (["good", "bad"], 1, "2 rows: 1 as expected, 1 OTHERWISE, 0 not done here"),
        (["breaks"], 1, "1 rows: 0 as expected, 1 OTHERWISE, 0 not done here"),
        (["good", "cannot"], 2, "2 rows: 1 as expected, 0 OTHERWISE, 1 not done here"),
        (["bad", "cannot"], 1, "2 rows: 0 as expected, 1 OTHERWISE, 1 not done here"),
    ],
)
def test_faults_that_could_not_be_injected_are_counted_separately(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: list[str],
    status: int,
    total: str,
) -> None:
    monkeypatch.setattr("tests.faults.__main__.TABLE", [ROWS[name] for name in rows])
    assert main([]) == status
    assert capsys.readouterr().out.splitlines()[-1] == total


def test_words_that_match_no_row_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no such row"]) == 1
    assert "no such row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        ([1000, 950, 1000], surroundings.BUSY),  # alone, beside other work, the repeated losses
        ([1000, 1200, 1000, 1010], "NOT SO: 1200 updates against 1000 and 1010 alone"),
        ([1000, 1200, 1000, 1200], "the machine was busy before: two plans alone have 1000 and 1200 updates"),
    ],
)
def test_a_machine_that_was_busy_before_does_not_decide_the_row_of_other_work(
    monkeypatch: pytest.MonkeyPatch, planned: list[int], expected: str
) -> None:
    monkeypatch.setattr(surroundings, "other_work", lambda processes: contextlib.nullcontext())
    studies = iter([study_of(updates) for updates in planned])
    bench = cast(Bench, SimpleNamespace(workplace=lambda **changes: next(studies)))
    try:
        found = surroundings.busy_machine(bench)
    except CannotDoError as reason:
        found = str(reason)
    assert found == expected


def study_of(updates: int) -> SimpleNamespace:
    """Return a study that finished with this plan."""
    return SimpleNamespace(
        command=lambda *words: SimpleNamespace(returncode=0, stdout=""),
        plan=lambda: {"variants": {"B": {"iterations": updates}}},
        status=lambda: "finished",
        numbers=lambda: {"losses": [1.0]},
    )
