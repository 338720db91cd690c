"""A figure as pgfplots: the data and labels that plotly would draw, in the colors of print."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pages.latex_figure import print_colors, render_pgfplots
from pages.page import asset
from pages.plots import axis, band, figure, line, points, trace

SIZE = (300, (1, 1, 1, 1), dict[str, object]())


def coordinates(text: str) -> list[list[tuple[float, float]]]:
    """The points of each plot."""
    plots = re.findall(r"coordinates \{(.*?)\n?\}", text, re.DOTALL)
    pair = r"(?<![-+]= )\(([^,()]+),([^,()]+)\)"
    return [[(float(x), float(y)) for x, y in re.findall(pair, plot)] for plot in plots]


def balanced(text: str) -> None:
    opened: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")


def test_lines_and_bands_have_their_points_colors_and_names() -> None:
    data = [
        band("A range", "var(--v1)", 0.25, x=[1, 2, 2, 1], y=[5, 6, 3, 4]),
        line("A_1", "var(--v1)", x=[1, 2], y=[4.5, 4.25], marker={"size": 6, "symbol": "square"}),
        line("50 % & B", "var(--v2)", dash="dash", x=[1, 2e9], y=[None, 0.1]),
    ]
    spec = figure(data, *SIZE, xaxis=axis("tokens_x"), yaxis=axis("loss", type="log"))
    text = render_pgfplots(spec, "About 5 %", "fig:a")
    balanced(text)
    band_points, first, second = coordinates(text)
    assert band_points == [(1, 5), (2, 6), (2, 3), (1, 4)]
    assert first == [(1, 4.5), (2, 4.25)]
    assert (str(second[0]), second[1]) == ("(1.0, nan)", (2e9, 0.1))
    assert re.findall(r"\\addlegendentry\{(.*)\}", text) == [r"A\_1", r"50~\% \& B"]
    assert "fill=pagev1, fill opacity=0.25, forget plot" in text
    assert "mark=square*" in text
    assert "mark=none" in text
    assert "dashed" in text
    assert "xlabel={tokens\\_x}" in text
    assert "ymode=log" in text
    assert "\\caption{About 5~\\%}\n\\label{fig:a}" in text
    assert text.count("\\definecolor") == 2
    assert f"\\definecolor{{pagev1}}{{HTML}}{{{print_colors()['v1']}}}" in text


def test_the_colors_are_those_of_print() -> None:
    printed = asset("page.css").partition("@media print")[2]
    for name, code in print_colors().items():
        assert f"--{name}: #{code.lower()}" in printed
    assert print_colors()["page"] == "FFFFFF"


def test_estimates_have_bars_and_labels_of_two_lines() -> None:
    ticks = {
        "tickvals": [0, -1],
        "ticktext": ["A&amp;B<br><span style='x'>against, B</span>", "C"],
        "range": [-1.6, 0.6],
    }
    data = [
        points("A", "var(--v1)", [(1.0, 0.5, 2.5)], [0], "diamond"),
        points("C", "var(--v3)", [(3.0, None, None)], [-1], "circle"),
    ]
    shapes = [
        {"type": "rect", "x0": -1, "x1": 1, "fillcolor": "var(--noise, 0.16)"},
        {"type": "line", "x0": 0, "x1": 0, "line": {"color": "var(--soft)"}},
    ]
    text = render_pgfplots(figure(data, *SIZE, yaxis=ticks, shapes=shapes))
    balanced(text)
    assert "(1,0) += (1.5,0) -= (0.5,0)" in text
    assert "(3,-1) += (0,0) -= (0,0)" in text
    assert "yticklabels={{A\\&B\\\\\\scriptsize against, B},{C}}" in text
    assert "ytick={0,-1}" in text
    assert "ymin=-1.6,\n  ymax=0.6" in text
    assert "mark=diamond*" in text
    assert "\\addlegendentry" not in text
    assert "\\caption" not in text
    assert text.index("\\fill[fill=pagenoise, fill opacity=0.16]") < text.index("\\addplot")
    assert "\\draw[color=pagesoft]" in text


@given(st.lists(st.tuples(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12)), min_size=1))
def test_every_point_is_there_to_nine_digits(drawn: list[tuple[float, float]]) -> None:
    text = render_pgfplots(
        figure([line("A", "var(--v1)", x=[x for x, _ in drawn], y=[y for _, y in drawn])], *SIZE)
    )
    (found,) = coordinates(text)
    assert len(found) == len(drawn)
    for one, other in zip(found, drawn, strict=True):
        assert one == pytest.approx(other, rel=1e-8)


def test_other_kinds_and_colors_are_refused() -> None:
    with pytest.raises(ValueError, match="no LaTeX form for bar"):
        render_pgfplots(figure([trace("A", type="bar", x=[1], y=["A"])], *SIZE))
    with pytest.raises(ValueError, match="red is not a color"):
        render_pgfplots(figure([line("A", "red", x=[1], y=[1])], *SIZE))
