"""The numbers of a figure as tables: those that plotly would draw, at every option; and a sentence."""

import copy
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from referee.pages.document import Document, Figure, Note, Paragraph, Table
from referee.pages.figures import (
    MOST_ROWS,
    axis,
    band,
    describe,
    figure,
    line,
    number_blocks,
    points,
    trace,
    with_option,
)
from referee.pages.html_page import render_html

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


def test_a_thinned_table_says_so() -> None:
    data = [line("A", "var(--v1)", x=list(range(120)), y=list(range(120)))]
    note, table = number_blocks(Figure("f", figure(data, *SIZE)))
    assert isinstance(table, Table)
    assert note == Note("50 of 120 rows, evenly spread.")
    assert [table.rows[0][0], table.rows[-1][0], len(table.rows)] == ["0", "119", 50]


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


def test_error_bars_of_a_line_and_several_points_at_one_place() -> None:
    data = [
        line("A", "var(--v1)", x=[1, 2], y=[3.0, 4.0], error_y={"array": [0.5, 1]}),
        trace("seeds", mode="markers", x=[1, 1], y=[2, 2.5]),
    ]
    assert tables(figure(data, *SIZE))[0][1:] == [["1", "3 [2.5, 3.5]", "2; 2.5"], ["2", "4 [3, 5]", ""]]


def test_bars_of_two_panels_and_a_heat_map() -> None:
    bars = [
        trace("A", type="bar", orientation="h", x=[52428.8], y=["A"], xaxis="x"),
        trace("A", type="bar", orientation="h", x=[1.5], y=["A"], xaxis="x2"),
    ]
    spec = figure(bars, *SIZE, xaxis=axis("tokens a second"), xaxis2=axis("GiB"))
    assert tables(spec) == [[["name", "tokens a second", "GiB"], ["A", "52,429", "1.5"]]]
    heat = trace("gap", type="heatmap", x=["p", "q"], y=["B"], z=[[0.5, None]], customdata=[[0.25, None]])
    assert tables(figure([heat], *SIZE)) == [[["name", "p", "q"], ["B", "0.25", "-"]]]
    causal = trace("map", type="heatmap", x=[0, 1], y=[0, 1], z=[[1.0], [0.25, 0.75]])
    assert tables(figure([causal], *SIZE)) == [[["name", "0", "1"], ["0", "1", "-"], ["1", "0.25", "0.75"]]]
    large = trace("map", type="heatmap", x=list(range(32)), y=list(range(32)), z=[[0.0] * 32] * 32)
    assert tables(figure([large], *SIZE)) == []


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


def test_given_numbers_replace_those_of_the_traces_and_the_page_folds_them() -> None:
    spec = figure([line("A", "var(--v1)", x=[1], y=[2])], *SIZE)
    text = render_html(Document("t", [Figure("f", spec, "About <it>", [Paragraph("see there")])]))
    assert '<details class="numbers"><summary>numbers of this figure</summary>\n<p>see there</p>' in text
    assert 'role="img" aria-label="Figure: About &lt;it&gt;; A."' in text
