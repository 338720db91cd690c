"""Figures as plain data for plotly.js: traces and layouts that pages share. html_page.py describes the form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from referee.pages.markup import escape_html

Plain = dict[str, Any]
Estimate = tuple[float, float | None, float | None]  # and its bounds, None where unknown


def figure(
    data: Sequence[Plain],
    height: int,
    margin: tuple[int, int, int, int],
    narrow: Plain,
    choices: Sequence[Plain] = (),
    **layout: Any,
) -> Plain:
    """A figure. margin: left, right, top, bottom. narrow: a patch of the layout for narrow screens."""
    size = {"height": height, "margin": dict(zip("lrtb", margin, strict=True))}
    return {"data": list(data), "layout": size | layout, "narrow": narrow, "choices": list(choices)}


def axis(title: str, **options: Any) -> Plain:
    return {"title": {"text": title}} | options


def faded(ink: str, alpha: float) -> str:
    """A color "var(--v1)" of the page as a transparent one."""
    return ink.replace(")", f", {alpha:g})")


def trace(name: str, group: str = "", **attributes: Any) -> Plain:
    """A trace. group: the name in the page's legend that hides and shows it. Both names are data."""
    legend = {"legendgroup": escape_html(group)} if group else {}
    return {"type": "scatter", "name": escape_html(name)} | legend | attributes


def line(
    name: str,
    ink: str,
    group: str = "",
    label: str = "",
    width: float = 2,
    dash: str = "solid",
    **attributes: Any,
) -> Plain:
    """A line, with markers if it has the attribute `marker`. label: the text at its right end."""
    mode = "lines+markers" if "marker" in attributes else "lines"
    stroke = {"color": ink, "width": width, "dash": dash}
    return trace(name, group, mode=mode, line=stroke, meta=escape_html(label), **attributes)


def band(name: str, ink: str, alpha: float, group: str = "", **attributes: Any) -> Plain:
    """The area between two lines, of which the second runs backwards."""
    stroke = {"width": 0, "color": faded(ink, 0)}
    attributes |= {"mode": "lines", "fill": "toself", "fillcolor": faded(ink, alpha), "hoverinfo": "skip"}
    return trace(name, group, line=stroke, **attributes)


def points(
    name: str, ink: str, estimates: Sequence[Estimate], y: Sequence[Any], symbol: Any, **attributes: Any
) -> Plain:
    """Estimates with horizontal bars to their bounds; no bar where these are None."""
    bars = {"type": "data", "symmetric": False, "color": ink, "thickness": 2, "width": 5}
    bars["arrayminus"] = [None if low is None else middle - low for middle, low, _ in estimates]
    bars["array"] = [None if high is None else high - middle for middle, _, high in estimates]
    bars["visible"] = any(low is not None for _, low, _ in estimates)
    marker = {"symbol": symbol, "size": 10, "color": ink, "line": {"color": ink, "width": 2}}
    attributes |= {"x": [middle for middle, _, _ in estimates], "y": list(y)}
    return trace(name, mode="markers", marker=marker, error_x=bars, **attributes)
