"""A figure in words and tables, for readers who do not see it: built from the same data that plotly draws."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from referee.pages.document import Block, Figure, Note, Table
from referee.pages.markup import escape_html, to_plain

# Figures as plain data for plotly.js: traces and layouts that pages share. html_page.py describes the form.


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


NAME = "name"  # heading of the first column
MOST_ROWS = 50  # of a table; evenly spread ones are shown of more
MOST_NAMES = 12  # in a sentence
MOST_CELLS = 400  # of a heat map; a larger one has no table


def plain_text(markup: str) -> str:
    """A text of a figure without its tags and entities."""
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"<br\s*/?>", ", ", markup)))


def with_option(spec: Plain, choice: int, option: int) -> Plain:
    """The figure after one switch, the others at their first option, as page.js draws it."""
    data, layout = spec["data"], spec["layout"]
    for number, one in enumerate(spec["choices"]):
        patch = one["options"][option if number == choice else 0]
        if "data" in patch:
            data = [_merged(trace, change) for trace, change in zip(data, patch["data"], strict=True)]
        layout = _merged(layout, patch.get("layout", {}))
    return spec | {"data": data, "layout": layout}


def _merged(base: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        result[key] = _merged(result.get(key), value)
    return result


def describe(figure: Figure) -> str:
    """A sentence on what the figure shows, in place of its picture."""
    spec = with_option(figure.spec or {}, 0, 0)
    axes = " against ".join(filter(None, (_title(spec, name) for name in ("yaxis", "xaxis"))))
    traces = [trace for trace in _shown(spec) if not _is_band(trace) and "z" not in trace]
    names = [name for name in dict.fromkeys(plain_text(trace.get("name", "")) for trace in traces) if name]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    parts = [axes or to_plain(figure.caption).rstrip("."), ", ".join(names[:MOST_NAMES]) + more]
    return f"Figure: {'; '.join(filter(None, parts)) or figure.name}."


def number_blocks(figure: Figure) -> Sequence[Block]:
    """The numbers of the figure, at its first options and after each single switch that changes them."""
    if figure.numbers is not None:
        return figure.numbers
    return [block for name, view in _views(figure.spec or {}) for block in _view_blocks(name, view)]


def _views(spec: Plain) -> Iterator[tuple[str, Plain]]:
    yield "", with_option(spec, 0, 0)
    for place, choice in enumerate(spec["choices"]):
        for number, option in enumerate(choice["options"]):
            if number and option.get("data"):
                yield f"{choice['label']}: {option['name']}", with_option(spec, place, number)


def _view_blocks(name: str, spec: Plain) -> list[Block]:
    traces = _shown(spec)
    tables = [
        *_heat_maps([trace for trace in traces if trace.get("type") == "heatmap"]),
        _bars(spec, [trace for trace in traces if trace.get("type") == "bar"]),
        _estimates(spec, [trace for trace in traces if _is_estimate(trace)]),
        _curves(spec, [trace for trace in traces if _is_curve(trace)]),
    ]
    blocks: list[Block] = []
    for table, all_rows in tables:
        few = f"{len(table.rows)} of {all_rows} rows, evenly spread." if all_rows > len(table.rows) else ""
        blocks += (
            [Note(" ".join(filter(None, [f"{name}." if name else "", few]))), table] if table.rows else []
        )
    return blocks


def _shown(spec: Plain) -> list[Plain]:
    """The traces that hold numbers."""
    return [one for one in spec["data"] if one.get("visible", True) and (len(one.get("y", ())) or "z" in one)]


def _is_estimate(trace: Plain) -> bool:
    return trace.get("type", "scatter") == "scatter" and "error_x" in trace


def _is_curve(trace: Plain) -> bool:
    return trace.get("type", "scatter") == "scatter" and "error_x" not in trace


def _is_band(trace: Plain) -> bool:
    return trace.get("fill") == "toself"


def _title(spec: Plain, axis: str) -> str:
    return plain_text(spec["layout"].get(axis, {}).get("title", {}).get("text", ""))


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, str):
        return plain_text(value)
    whole = float(value).is_integer() or abs(value) >= 1e4
    return f"{value:,.0f}" if whole and abs(value) < 1e15 else f"{value:.5g}"


def _spread(rows: Sequence[Any]) -> list[Any]:
    """At most MOST_ROWS rows, evenly spread, with the first and the last."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (MOST_ROWS - 1))] for place in range(MOST_ROWS)]


def _curves(spec: Plain, traces: Sequence[Plain]) -> tuple[Table, int]:
    """A row for each x and a column for each line; a band is an interval."""
    columns = [_by_x(trace) for trace in traces]
    places = list(dict.fromkeys(x for column in columns for x in column))
    if all(isinstance(x, int | float) for x in places):
        places.sort()
    rows = [[_number(x), *(column.get(x, "") for column in columns)] for x in _spread(places)]
    names = [plain_text(trace.get("name", "")) for trace in traces]
    title = _title(spec, "xaxis") or "x"
    upwards = _title(spec, "yaxis")
    heads = [f"{name}: {upwards}" if upwards and len(names) == 1 else name for name in names]
    return Table([title, *heads], rows), len(places)


def _by_x(trace: Plain) -> Mapping[Any, str]:
    x, y = list(trace.get("x", ())), list(trace["y"])
    x = x or list(range(len(y)))
    if _is_band(trace):  # the second half runs backwards
        half = len(y) // 2
        pairs = zip(y[:half], reversed(y[half:]), strict=True)
        return {
            at: f"[{_number(min(ends))}, {_number(max(ends))}]" for at, ends in zip(x, pairs, strict=False)
        }
    bars = trace.get("error_y", {})
    highs, lows = bars.get("array"), bars.get("arrayminus") or bars.get("array")
    cells: dict[Any, str] = {}
    for place, (at, value) in enumerate(zip(x, y, strict=True)):
        text = _number(value)
        if highs and lows and highs[place] is not None and lows[place] is not None:
            text += f" [{_number(value - lows[place])}, {_number(value + highs[place])}]"
        cells[at] = f"{cells[at]}; {text}" if at in cells else text
    return cells


def _estimates(spec: Plain, traces: Sequence[Plain]) -> tuple[Table, int]:
    """A row for each estimate with the ends of its bar."""
    axis = spec["layout"].get("yaxis", {})
    labels = dict(zip(axis.get("tickvals", ()), axis.get("ticktext", ()), strict=False))
    rows = []
    for trace in traces:
        bars, name = trace["error_x"], plain_text(trace.get("name", ""))
        for place, (value, at) in enumerate(zip(trace["x"], trace["y"], strict=True)):
            where = plain_text(str(labels.get(round(at), "") if not isinstance(at, str) else at))
            low, high = bars["arrayminus"][place], bars["array"][place]
            label = next((one for one in (where, name) if one.startswith(where) and one.startswith(name)), "")
            ends = [None if low is None else value - low, None if high is None else value + high]
            rows.append([label or f"{name}, {where}", *map(_number, [value, *ends])])
    return Table([NAME, _title(spec, "xaxis") or "value", "low", "high"], rows), len(rows)


def _bars(spec: Plain, traces: Sequence[Plain]) -> tuple[Table, int]:
    """A row for each bar's name and a column for each panel."""
    along = ("y", "x") if any(trace.get("orientation") == "h" for trace in traces) else ("x", "y")
    panels = list(dict.fromkeys(trace.get(f"{along[1]}axis", along[1]) for trace in traces))
    cells: dict[str, dict[str, str]] = {}
    for trace in traces:
        panel = trace.get(f"{along[1]}axis", along[1])
        for at, value in zip(trace.get(along[0], ()), trace[along[1]], strict=False):
            cells.setdefault(_number(at), {})[panel] = _number(value)
    titles = [_title(spec, re.sub(r"^([xy])", r"\1axis", panel)) or "value" for panel in panels]
    rows = [[at, *(by_panel.get(panel, "-") for panel in panels)] for at, by_panel in cells.items()]
    return Table([NAME, *titles], _spread(rows)), len(rows)


def _heat_maps(traces: Sequence[Plain]) -> list[tuple[Table, int]]:
    """A table of each heat map that is small enough to be read as one."""
    tables = []
    for trace in traces:
        values = trace["customdata"] if "customdata" in trace else trace["z"]
        columns = len(trace["x"])
        if len(values) * columns <= MOST_CELLS:
            full = [
                [*row, *[None] * (columns - len(row))] for row in values
            ]  # a causal row ends at the diagonal
            rows = [[_number(at), *map(_number, row)] for at, row in zip(trace["y"], full, strict=True)]
            tables.append((Table([NAME, *map(_number, trace["x"])], rows), len(rows)))
    return tables
