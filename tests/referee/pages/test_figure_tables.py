"""The numbers of a figure as tables: those that plotly would draw, at every option; and a sentence."""

import copy
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from referee.pages.document import Figure, Note, Table
from referee.pages.figures import (
    MOST_ROWS,
    axis,
    band,
    describe,
    figure,
    line,
    number_blocks,
    points,
    with_option,
)

SIZE: tuple[int, tuple[int, int, int, int], dict[str, Any]] = (300, (1, 1, 1, 1), {})


def tables(spec: dict[str, Any]) -> list[list[list[Any]]]:
    """Headings and rows of each table."""
    blocks = number_blocks(Figure("f", spec))
    return [[list(one.headings), *map(list, one.rows)] for one in blocks if isinstance(one, Table)]


def test_lines_share_their_x_and_a_band_is_an_interval() -> None:
    data = [
        band("A, range", "var(--v1)", 0.1, x=[1, 2, 2, 1], y=[5, 6, 3, 4]),
        line("A", "var(--v1)", x=[1, 2], y=[4.5, 4.25]),
        line("B & C", "var(--v2)", x=[2, 3000], y=[None, 1234567.0]),
    ]
    spec = figure(data, *SIZE, xaxis=axis("tokens"), yaxis=axis("loss"))
    assert tables(spec) == [[
        ["tokens", "A, range", "A", "B & C"],
        ["1", "[4, 5]", "4.5", ""],
        ["2", "[3, 6]", "4.25", "-"],
        ["3,000", "", "", "1,234,567"],
    ]]  # fmt: skip
    assert describe(Figure("f", spec)) == "Figure: loss against tokens; A, B & C."


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(-1e6, 1e6)), min_size=1, unique_by=lambda one: one[0])
)
def test_every_point_of_a_short_line_is_in_its_table(drawn: list[tuple[int, float]]) -> None:
    x, y = [place for place, _ in drawn], [value for _, value in drawn]
    (table,) = tables(figure([line("A", "var(--v1)", x=x, y=y)], *SIZE))
    found = [(int(cells[0].replace(",", "")), float(cells[1].replace(",", ""))) for cells in table[1:]]
    expected = sorted(drawn)
    assert len(found) == min(len(drawn), MOST_ROWS)
    assert (found[0][0], found[-1][0]) == (expected[0][0], expected[-1][0])
    values = dict(drawn)
    for place, value in found:
        assert math.isclose(value, values[place], rel_tol=5.1e-5, abs_tol=1e-12)


def test_estimates_have_the_ends_of_their_bars() -> None:
    ticks = {"tickvals": [0, -1], "ticktext": ["A<br><span style='x'>against B</span>", "C"]}
    data = [
        points("A", "var(--v1)", [(1.0, 0.5, 2.0)], [0], "circle"),
        points("C acc", "var(--v1)", [(3.0, None, None)], [-0.86], "circle"),
    ]
    spec = figure(data, *SIZE, xaxis=axis("%"), yaxis=ticks)
    assert tables(spec) == [
        [["name", "%", "low", "high"], ["A, against B", "1", "0.5", "2"], ["C acc", "3", "-", "-"]]
    ]
    by_name = points("study two", "var(--v1)", [(1.0, 0.5, 2.0)], ["B"], ["circle"])
    assert tables(figure([by_name], *SIZE))[0][1][0] == "study two, B"


CHOICES = [
    {"label": "Axis", "options": [
        {"name": "one", "data": [{"x": [1], "y": [7]}], "layout": {"xaxis": axis("first")}},
        {"name": "two", "data": [{"x": [2]}], "layout": {"xaxis": {"title": {"text": "second"}}}},
    ]},
    {"label": "Scale", "options": [{"name": "linear"}, {"name": "log", "layout": {"xaxis": {"type": "log"}}}]},
]  # fmt: skip


def test_each_switch_that_changes_numbers_has_a_table() -> None:
    spec = figure([line("A", "var(--v1)", y=[9])], *SIZE, choices=CHOICES, yaxis=axis("y"))
    before = copy.deepcopy(spec)
    blocks = number_blocks(Figure("f", spec))
    assert [block.text for block in blocks if isinstance(block, Note)] == ["", "Axis: two."]
    assert tables(spec) == [[["first", "A: y"], ["1", "7"]], [["second", "A: y"], ["2", "9"]]]
    assert with_option(spec, 1, 1)["layout"]["xaxis"] == axis("first") | {"type": "log"}
    assert spec == before
