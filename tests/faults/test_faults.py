"""The quick rows of `make faults`, as tests."""

import pytest

from tests.faults import data, failures, signals, storage, surroundings  # noqa: F401  (they fill the table)
from tests.faults.harness import TABLE, Bench, CannotDoError, Fault


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("row", [row for row in TABLE if row.quick], ids=lambda row: row.name)
def test_a_fault_does_what_the_table_says(bench: Bench, row: Fault) -> None:
    try:
        assert row.inflict(bench) == row.expected
    except CannotDoError as reason:
        pytest.skip(str(reason))


def test_the_table_has_at_least_25_distinct_faults() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE) >= 25
