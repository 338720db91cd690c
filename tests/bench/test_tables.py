"""Tables and spreads: the interval of a median, and aligned columns."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from bench.tables import ResultTable, format_spread, spread


@settings(max_examples=60, deadline=None)
@given(rounds=st.integers(6, 40), seed=st.integers(0, 999))
def test_the_interval_of_a_median_is_the_narrowest_that_the_sign_test_allows(rounds: int, seed: int) -> None:
    values = random.Random(seed).sample(range(1000), rounds)
    found = spread([float(value) for value in values])
    assert found
    assert found["least"] <= found["low"] <= found["median"] <= found["high"] <= found["most"]
    for bound in (found["low"], found["high"]):
        beyond = min(sum(value < bound for value in values), sum(value > bound for value in values))
        assert binomtest(beyond, rounds).pvalue <= 0.05  # a median outside of the interval is refused
        assert binomtest(beyond + 1, rounds).pvalue > 0.05  # one further inside is not


def test_few_rounds_give_their_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "low": 1.0,
        "high": 3.0,
        "least": 1.0,
        "most": 3.0,
    }


def test_no_values_have_no_spread() -> None:
    assert spread([]) is None
    assert format_spread(None) == "-"


def test_a_spread_is_written_with_its_interval_and_in_the_unit_asked_for() -> None:
    assert format_spread(spread([0.01, 0.03, 0.02]), ".1f", 100) == "2.0 [1.0, 3.0]"


def test_the_columns_of_a_table_are_aligned_between_its_title_and_its_notes() -> None:
    rows = [{"name": "B", "speed": 1.0}, {"name": "RALEARN", "speed": 0.25}]
    columns = {"case": lambda row: row["name"], "to B": lambda row: f"{row['speed']:.2f}"}
    assert str(ResultTable.of("speed", columns, rows, ["a note"])).splitlines() == [
        "speed",
        "case     to B",
        "B        1.00",
        "RALEARN  0.25",
        "a note",
    ]
