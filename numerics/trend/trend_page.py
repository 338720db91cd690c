"""`python -m numerics trend [REFERENCE] RUN`: the table of trends, and one heat map of tensors by steps."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from numerics.diagnose.spikes import LIMIT
from numerics.dump_files import finite, write_json, writing
from numerics.errors import NumericsError
from numerics.monitor.series import Floats, TensorSeries, common
from numerics.rows import HEADINGS, TableRow, text_table
from numerics.trend.trend import MonitoredRun, deviations, not_finite, quantities, read_run, trend
from pages.document import Block, Document, Figure, Paragraph, Table
from pages.markup import escape_html
from pages.page import render_html
from pages.plots import figure

DESCRIPTION = """
List the first anomaly of each monitored tensor, and where two runs depart (sections 4.6 and 4.7 of the guide). With two
runs the first is the reference. Files are those of the monitor or of msProbe: rank<r>/<kind>_<first>-<last>.csv. Writes
trend.html with a heat map, and trend.json. The exit status is 0 for every result, and 1 where files cannot be used.
"""
LISTED = 20  # rows in the terminal
COLUMNS, MAPS = 180, 24  # steps of a heat map, each the most extreme of several in a long run; maps of a page
DeviationMap = tuple[str, Floats, TensorSeries]  # name, deviations (tensors, steps), table
COLORS = [[0, "#2166ac"], [0.5, "#f7f7f7"], [1, "#b2182b"]]  # below, as and above the expected value


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "trend", description=DESCRIPTION, help="trends of monitored tensors over steps"
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="folder of a run, of ranks, or of one rank; the reference first"
    )
    parser.add_argument("-o", "--output_path", type=Path, default=Path("trend"), help="folder of results")
    parser.set_defaults(run=run_trend)


def run_trend(given: argparse.Namespace) -> int:
    print(*show(given.runs, given.output_path, record_command), sep="\n")
    return 0


def record_command(run: Path, step: int) -> str:
    """Return how a script records a step."""
    return (
        f'record step {step} of {run} with PrecisionDebugger(task="statistics", level="mix", step=[{step}])'
    )


def show(paths: Sequence[Path], folder: Path, record: Callable[[Path, int], str]) -> list[str]:
    """Compare a run with its history or with a reference, and write the results. Returns the lines to print."""
    if len(paths) > 2:
        raise NumericsError(f"{len(paths)} runs are given; fix: name one run, or a reference and a run")
    if len(paths) == 2 and os.path.realpath(paths[0]) == os.path.realpath(paths[1]):
        raise NumericsError(f"{paths[0]} is named twice; fix: name two different runs")
    runs = [read_run(path) for path in paths]
    run, reference = runs[-1], runs[0] if len(runs) > 1 else None
    rows, maps = trend(run, reference), deviation_maps(run, reference)
    count = sum(int(np.isfinite(units).sum()) for _, units, _ in maps)
    whole = sum(int(table.present.sum()) for _, _, table in maps)
    tested = f"{count:,} of {whole:,} values were tested: a value needs 16 of its tensor before it"
    facts = [tested, *(note for one in runs for note in one.notes)]
    title = "Trends of " + " against ".join(str(one.path) for one in (run, reference) if one)
    page = write_trend(rows, facts, title, maps, folder)
    more = [f"{len(rows) - LISTED} more rows are in {page}"] if len(rows) > LISTED else []
    steps = [row.place.partition("step ")[2].partition(",")[0] for row in rows if "step " in row.place]
    commands = [record(path, int(steps[0])) for path in paths] if steps else ["nothing"]
    table = text_table(rows[:LISTED])
    return [title, "", *table, *more, *facts, f"wrote {page}", *(f"next: {one}" for one in commands)]


def write_trend(
    rows: Sequence[TableRow], facts: Sequence[str], title: str, maps: Sequence[DeviationMap], folder: Path
) -> Path:
    """Write trend.html, and the rows as trend.json, into the folder. Returns the path of the page."""
    page = folder / "trend.html"
    kind = rows[0].call.partition(" ")[0] if rows else ""
    first = sorted(maps, key=lambda one: one[2].kind != kind)  # the map of the first row is shown first
    table = Table(HEADINGS, [row.cells for row in rows])
    blocks: list[Block] = [*map(Paragraph, facts), table, Figure("tensors", heat_map(first), numbers=())]
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)
        plain = [{key: finite(value) for key, value in vars(row).items()} for row in rows]
        write_json(folder / "trend.json", {"title": title, "facts": list(facts), "rows": plain})
        page.write_text(render_html(Document(title, blocks)), encoding="utf-8")
    return page


def deviation_maps(run: MonitoredRun, reference: MonitoredRun | None) -> list[DeviationMap]:
    """Return the first tested statistic of each kind and rank."""
    found = []
    for (kind, rank), table in run.tables.items():
        other = None
        if reference is not None:
            if (kind, rank) not in reference.tables:
                continue
            table, other = common(table, reference.tables[kind, rank])
        for word, quantity in list(quantities(table).items())[:1]:
            units, _ = deviations(table, word, quantity, other)
            found.append((f"{kind}, {word}" + (f", rank {rank}" if rank else ""), units, table))
    return found


def heat_map(maps: Sequence[DeviationMap]) -> dict[str, Any] | None:
    """Return the figure: scales by tensor and step, a kind and rank at a time. Not finite is the end of the scale."""
    options: list[dict[str, Any]] = []
    for name, units, table in maps[:MAPS]:
        extreme = np.where(not_finite(table), 2 * LIMIT, np.clip(units, -2 * LIMIT, 2 * LIMIT))
        group = -(-len(table.steps) // COLUMNS)
        parts = [extreme[:, at : at + group] for at in range(0, len(table.steps), group)]
        largest = np.stack([_extreme(part) for part in parts], axis=1)
        z = [[None if np.isnan(value) else round(float(value), 2) for value in row] for row in largest[::-1]]
        data = {
            "x": table.steps[::group].tolist(),
            "y": [escape_html(one) or name for one in table.names[::-1]],
            "z": z,
        }
        options.append(
            {"name": name, "data": [data], "layout": {"height": 120 + 14 * max(4, len(table.names))}}
        )
    if not options:
        return None
    bar = {
        "orientation": "h",
        "y": 1,
        "yanchor": "bottom",
        "thickness": 10,
        "title": {"text": "scales", "side": "top"},
    }
    colors = {"cmin": -2 * LIMIT, "cmax": 2 * LIMIT, "colorscale": COLORS, "colorbar": bar}
    map_of = {
        "type": "heatmap",
        "coloraxis": "coloraxis",
        "hovertemplate": "%{y}<br>step %{x}: %{z} scales<extra></extra>",
    } | options[0]["data"][0]
    choice = {"label": "Kind", "options": options}
    axes = {
        "xaxis": {"tickprefix": "step ", "showtickprefix": "first"},
        "yaxis": {
            "type": "category",
            "automargin": True,
            "showgrid": False,
            "dtick": 1,
            "tickfont": {"size": 10},
        },
    }
    narrow = {"yaxis": {"tickfont": {"size": 8}}}
    height = options[0]["layout"]["height"]
    return figure([map_of], height, (120, 10, 60, 30), narrow, [choice], coloraxis=colors, **axes)


def _extreme(part: Floats) -> Floats:
    """Return the value of the largest magnitude of each row; NaN where a row has none."""
    sizes = np.where(np.isnan(part), -1.0, np.abs(part))
    return np.take_along_axis(part, sizes.argmax(axis=1)[:, None], axis=1)[:, 0]
