"""The quick rows of `make faults` as tests, and the summary of the table."""

import pytest

from tests.faults import (  # noqa: F401  (they fill the table)
    clusters,
    damaged,
    data,
    failures,
    grpo_studies,
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
