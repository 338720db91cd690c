"""A figure as pgfplots for a paper, from the same data that plotly draws: lines, bands, points with their bars."""

from __future__ import annotations

import functools
import html
import math
import re
from typing import Any

from pages.latex import caption_lines, escape_latex
from pages.markup import Text
from pages.page import asset

Plain = dict[str, Any]
NEEDS = "% \\usepackage{pgfplots} \\pgfplotsset{compat=1.16}"
MARKS = {
    "circle": "*", "circle-open": "o", "square": "square*", "diamond": "diamond*", "triangle-up": "triangle*",
    "cross": "+", "star": "star", "x": "x", "pentagon": "pentagon*", "hexagon": "otimes", "bowtie": "oplus",
}  # fmt: skip
DASHES = {"dash": "dashed", "dot": "dotted"}


@functools.cache
def print_colors() -> dict[str, str]:
    """The colors of the page in print: name -> RRGGBB."""
    block = re.findall(r":root \{(.*?)\}", asset("page.css"), re.DOTALL)[-1]
    return {name: code.upper() for name, code in re.findall(r"--(\w+): #([0-9a-f]{6})", block)}


def render_pgfplots(spec: Plain, caption: Text = "", label: str = "") -> str:
    """The figure as a float. spec: with its options applied (`figure_tables.with_option`).

    Error: ValueError for bars and heat maps, which have no such form.
    """
    traces = [trace for trace in spec["data"] if trace.get("visible", True) and len(trace.get("y", ()))]
    kinds = {trace.get("type", "scatter") for trace in traces}
    if kinds - {"scatter"}:
        raise ValueError(f"no LaTeX form for {', '.join(sorted(kinds))}")
    shapes = [line for shape in spec["layout"].get("shapes", ()) for line in _shape(shape)]
    named = sum(_is_named(trace) for trace in traces) > 1
    plots = [line for trace in traces for line in _plot(trace, named)]
    used = dict.fromkeys(re.findall(r"=(page\w+)", "\n".join([*shapes, *plots])))
    colors = [f"\\definecolor{{{name}}}{{HTML}}{{{print_colors()[name[4:]]}}}" for name in used]
    body = [*colors, f"\\begin{{axis}}[{_options(spec, named)}]", *shapes, *plots, "\\end{axis}"]
    picture = ["\\begin{tikzpicture}", *body, "\\end{tikzpicture}"]
    head = [NEEDS, "\\begin{figure}", "\\centering"]
    return "\n".join([*head, *picture, *caption_lines(caption, label), "\\end{figure}"])


def _text(markup: str) -> str:
    """A text of the figure on one line; the lines after its first are smaller."""
    lines = [escape_latex(html.unescape(re.sub(r"<[^>]*>", "", part))) for part in markup.split("<br>")]
    return "\\\\".join([lines[0], *(f"\\scriptsize {line}" for line in lines[1:])])


def _number(value: float | None) -> str:
    return "nan" if value is None or math.isnan(value) else f"{value:.9g}"


def _options(spec: Plain, named: bool) -> str:
    layout = spec["layout"]
    width = "0.85" if "tickvals" in layout.get("yaxis", {}) else ""  # room for the labels of the ticks
    found = [f"width={width}\\linewidth", f"height={layout['height'] / 48:.3g}cm", "unbounded coords=jump"]
    found += ["max space between ticks=60pt"]
    found += ["label style={font=\\small}", "tick label style={font=\\footnotesize}"]
    found += ["grid=major", "grid style={black!12}", "axis line style={black!40}"]
    for name in ("x", "y"):
        axis = layout.get(f"{name}axis", {})
        title = axis.get("title", {}).get("text", "")
        found += [f"{name}label={{{_text(title)}}}"] if title else []
        if axis.get("type") == "log":
            found.append(f"{name}mode=log")
        elif reach := axis.get("range"):
            found += [f"{name}min={_number(min(reach))}", f"{name}max={_number(max(reach))}"]
        if ticks := axis.get("tickvals"):
            labels = ",".join(f"{{{_text(str(text))}}}" for text in axis["ticktext"])
            found += [f"{name}tick={{{','.join(map(_number, ticks))}}}", f"{name}ticklabels={{{labels}}}"]
            found.append(f"{name}ticklabel style={{align={'right' if name == 'y' else 'center'}}}")
    if named:
        style = "at={(0.5,1.03)}, anchor=south, draw=none, font=\\footnotesize, column sep=3pt"
        found += [f"legend style={{{style}}}", "legend columns=5"]
    return "\n  " + ",\n  ".join(found) + ",\n"


def _color(ink: str) -> tuple[str, float]:
    """The name of a color and its opacity, of "var(--v1)" or "var(--v1, 0.2)"."""
    found = re.fullmatch(r"var\(--(\w+)(?:, ([\d.]+))?\)", ink)
    if not found or found[1] not in print_colors():
        raise ValueError(f"{ink} is not a color of the page")
    return f"page{found[1]}", float(found[2] or 1)


def _shape(shape: Plain) -> list[str]:
    """A line or an area over the whole height."""
    left, right = _number(shape["x0"]), _number(shape["x1"])
    bottom = "\\pgfkeysvalueof{/pgfplots/ymin}"
    low, high = (f"{{axis cs:{x},{bottom}}}|-{{rel axis cs:0,{end}}}" for x, end in ((left, 0), (right, 1)))
    if shape["type"] == "rect":
        name, opacity = _color(shape["fillcolor"])
        return [f"\\fill[fill={name}, fill opacity={opacity:g}] ({low}) rectangle ({high});"]
    name, _ = _color(shape["line"]["color"])
    return [f"\\draw[color={name}] ({low}) -- ({high});"]


def _is_named(trace: Plain) -> bool:
    """Whether the legend names it; labels at the axis name points with bars."""
    return trace.get("fill") != "toself" and "error_x" not in trace


def _plot(trace: Plain, named: bool) -> list[str]:
    points = list(zip(trace["x"], trace["y"], strict=True))
    if trace.get("fill") == "toself":
        name, opacity = _color(trace["fillcolor"])
        style = f"draw=none, fill={name}, fill opacity={opacity:g}, forget plot"
        return [f"\\addplot[{style}] coordinates {{{_coordinates(points)}}} -- cycle;"]
    marker = trace.get("marker", {})
    name, _ = _color(trace["line"]["color"] if "line" in trace else marker["color"])
    style = f"color={name}, mark={_mark(marker)}, mark options={{solid, fill={name}}}"
    if "error_x" in trace:
        bars = trace["error_x"]
        style += ", mark size=2.5pt, only marks, error bars/.cd, x dir=both, x explicit"
        ends = zip(points, bars["array"], bars["arrayminus"], strict=True)
        drawn = "\n  ".join(
            f"({_number(x)},{_number(y)}) += ({_number(high or 0)},0) -= ({_number(low or 0)},0)"
            for (x, y), high, low in ends
        )
        return [f"\\addplot[{style}] coordinates {{\n  {drawn}\n}};"]
    line = trace.get("line", {})
    dash, width = DASHES.get(line.get("dash", ""), "solid"), line.get("width", 2) / 2
    style += f", mark size=1.5pt, {dash}, line width={width:g}pt"
    entry = [f"\\addlegendentry{{{_text(trace['name'])}}}"] if named else []
    return [f"\\addplot[{style}] coordinates {{{_coordinates(points)}}};", *entry]


def _mark(marker: Plain) -> str:
    symbol = marker.get("symbol", "circle") if marker else "none"
    return MARKS.get(symbol if isinstance(symbol, str) else symbol[0], "none")


def _coordinates(points: list[tuple[Any, Any]]) -> str:
    lines = [f"({_number(x)},{_number(y)})" for x, y in points]
    return (
        "\n  " + "\n  ".join(" ".join(lines[place : place + 4]) for place in range(0, len(lines), 4)) + "\n"
    )
