"""Trends of monitored tensors over steps: the first anomaly of each tensor, and where two runs depart (section 4.7).

A value is anomalous where it is not finite, or where it jumps (referee.numerics.diagnose.spikes) from its own
history; with a
reference, from the reference's value at that step, in units of the reference's own noise. One statistic of a tensor is
tested: the norm; of attention its entropy and its largest logit; else std or max. Two runs depart in a tensor that
is off by over 6 percent in nine of ten common steps or in the first eight, and differ from the first unequal value on.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from referee.errors import NumericsError
from referee.numerics.diagnose.spikes import LIMIT, LOGIT, LOSS, NORM, TENSOR, Quantity, expected
from referee.numerics.monitor.invariants import finding, same
from referee.numerics.monitor.monitor_tables import Floats, MonitorTables, TensorSeries, aligned, read_tables
from referee.numerics.monitor.targets import KINDS
from referee.numerics.rows import HEADINGS, TableRow, text_table
from referee.numerics.text_files import write_json, writing
from referee.pages.document import Block, Document, Figure, Paragraph, Table
from referee.pages.figures import figure
from referee.pages.html_page import render_html
from referee.pages.markup import escape_html
from referee.verdict.loss_files import Curve, read_curve

FIX = "name a run with CONFIG_MONITOR=y, or a folder with monitor files such as rank0/grad_reduced_0-99.csv"
TESTED: Mapping[str, Mapping[str, Quantity]] = {
    "loss": {"value": LOSS},
    "gradient norm": {"value": NORM},
    "attention": {"entropy": TENSOR, "logit_max": LOGIT},
    "update_ratio": {"ratio": TENSOR},
    "learning_rate": {"rate": NORM},
    **{kind: {} for kind in ("data", "grad_before")},
}
RISING = ("loss", "gradient norm", "update_ratio", "learning_rate")  # training lowers them
BACKWARD = ("actv_grad", "grad_unreduced", "grad_reduced", "grad_clipped")  # computed from the last layer on
FORWARD = [*list(KINDS)[:4], "loss"]
ORDER = ["param_origin", *FORWARD, *[kind for kind in KINDS if kind not in FORWARD], "gradient norm"]
ROUNDING = 2.0**-8  # relative, of bfloat16: the unit of a departure and of a reduction
DEPARTS = 16.0  # units in which a tensor is off, or its reduction
FEWEST, NEARLY_ALL = 8, 0.9  # common steps of a tensor, and the part of them in which it is off
Place = tuple[int, int, int, int]  # step, order of the kind, of the tensor, rank
Found = tuple[Place, TableRow]


def read_run(path: Path) -> MonitorTables:
    """Read a run's folder, a folder of ranks or that of one rank.

    The losses and gradient norms of its metrics.jsonl are kinds of one tensor. NumericsError names what cannot be read.
    """
    if not path.is_dir():
        raise NumericsError(f"{path} is not a folder; fix: {FIX}")
    run = read_tables(path)
    if not run.tables:
        raise NumericsError(f"{path} has no monitor files; fix: {FIX}")
    if (path / "metrics.jsonl").exists():
        curves = read_curve(path / "metrics.jsonl")
        for kind, curve in (("loss", curves.losses), ("gradient norm", curves.gradient_norms)):
            if curve:
                run.tables[kind, 0] = _series_of(kind, curve)
    return run


def _series_of(kind: str, curve: Curve) -> TensorSeries:
    steps = np.array(sorted(curve), dtype=np.int64)
    values = np.array([[curve[step] for step in steps.tolist()]])
    return TensorSeries(kind, 0, [""], steps, {"value": values}, np.ones(values.shape, dtype=bool))


def trend(run: MonitorTables | Path, reference: MonitorTables | Path | None = None) -> list[TableRow]:
    """Return the first anomaly of each tensor, in the order of computation; of two runs also where they depart."""
    run = read_run(run) if isinstance(run, Path) else run
    reference = read_run(reference) if isinstance(reference, Path) else reference
    first: dict[tuple[str, int, str], Found] = {}
    for table, other in pairs(run, reference):
        for place, row, name in _anomalies(run, table, other):
            key = table.kind, table.rank, name
            first[key] = min(first.get(key, (place, row)), (place, row), key=lambda one: one[0])
    found = [*first.values(), *_reductions(run)]
    if reference:
        found += _first_unequal(run, reference)
    return [row for _, row in sorted(found, key=lambda one: one[0])]


def pairs(
    run: MonitorTables, reference: MonitorTables | None
) -> Iterator[tuple[TensorSeries, TensorSeries | None]]:
    """Yield the tables of a run; with a reference the common parts of both runs' tables."""
    for key, table in run.tables.items():
        if reference is None:
            yield table, None
        elif key in reference.tables:
            mine, base = aligned(table, reference.tables[key])
            yield mine, base


def quantities(table: TensorSeries) -> dict[str, Quantity]:
    """Return statistic -> quantity of those that are tested in a table."""
    words = TESTED.get(table.kind)
    if words is None:
        words = dict.fromkeys([word for word in ("norm", "std", "max") if word in table.values][:1], TENSOR)
    return {word: quantity for word, quantity in words.items() if word in table.values}


def deviations(
    table: TensorSeries, word: str, quantity: Quantity, other: TensorSeries | None = None
) -> tuple[Floats, Floats]:
    """Return units, the signed deviation in scales, and expected values (tensors, steps); NaN where none is known.

    other: the reference, with the names and steps of the table.
    """
    values = table.values[word]
    base = other.values[word] if other else values
    usable = np.isfinite(values) & np.isfinite(base)
    units, middle = (np.full(values.shape, np.nan) for _ in range(2))
    for at in np.unique(usable, axis=0):  # the rows that have values at the same steps
        rows = np.ix_((usable == at).all(axis=1), at)
        here, there = quantity.transformed(values[rows]), quantity.transformed(base[rows])
        center, scale = expected(there, quantity)
        center = np.where(np.isnan(scale), np.nan, there) if other else center
        units[rows], middle[rows] = (here - center) / scale, quantity.restored(center)
    return units, middle


def _anomalies(
    run: MonitorTables, table: TensorSeries, other: TensorSeries | None
) -> Iterator[tuple[Place, TableRow, str]]:
    """Yield the first anomaly of each tensor and each reason."""
    places = _positions(run, table)

    def row(
        at: int, column: int, golden: float | str, word: str, units: float = math.nan, bound: float = math.nan
    ) -> tuple[Place, TableRow, str]:
        name, value = table.names[at], float(table.values[word][at, column])
        step, found = finding(table, name, int(table.steps[column]), value, golden, word, units, bound)
        return _place(step, table.kind, places[at], table.rank), found, name

    bad = not_finite(table)
    if other is not None:
        bad &= ~not_finite(other)
    words = quantities(table)
    for at in np.flatnonzero(bad.any(axis=1)).tolist():
        column = int(np.flatnonzero(bad[at])[0])
        word = next((word for word, one in table.values.items() if not np.isfinite(one[at, column])), "nan")
        yield row(at, column, "finite", word)
    for word, quantity in words.items():
        units, middle = deviations(table, word, quantity, other)
        with np.errstate(invalid="ignore"):
            jumps = (units if table.kind in RISING and other is None else np.abs(units)) > LIMIT
        for at in np.flatnonzero(jumps.any(axis=1)).tolist():
            column = int(np.flatnonzero(jumps[at])[0])
            yield row(at, column, float(middle[at, column]), word, abs(units[at, column]), LIMIT)
        if other is not None and quantity.log:
            for at, column, size in _departures(table.values[word], other.values[word]):
                yield row(at, column, float(other.values[word][at, column]), word, size, DEPARTS)


def _departures(values: Floats, base: Floats) -> Iterator[tuple[int, int, float]]:
    """Yield tensor, first step and units of each that is off in nearly all steps, or in each of the first ones.

    In the first steps the weights of both runs are still alike.
    """
    usable = np.isfinite(values) & np.isfinite(base) & ((values > 0) | (base > 0))
    with np.errstate(all="ignore"):
        sizes = np.abs(np.log(values / base)) / ROUNDING  # inf where one of two values is zero
        off = usable & (sizes > DEPARTS)
    for at in range(len(values)):
        flags = off[at, usable[at]]
        if len(flags) >= FEWEST and (flags.mean() >= NEARLY_ALL or flags[:FEWEST].all()):
            column = int(np.flatnonzero(off[at])[0])
            yield at, column, float(sizes[at, column])


def not_finite(table: TensorSeries) -> NDArray[np.bool_]:
    """Return where a tensor is not finite. Inf in every step is left out: it is a mask.

    So is Inf in the first updates that change a tensor: its weights were zero, as new biases are.
    """
    nan, inf = (np.zeros(table.present.shape, dtype=bool) for _ in range(2))
    for word, values in table.values.items():
        if word in ("nan", "inf"):
            target = nan if word == "nan" else inf
            target |= values > 0
        elif word != "scheduled":
            inf |= np.isinf(values)
            if "nan" not in table.values:
                nan |= np.isnan(values)
    inf &= table.present
    if table.kind == "update_ratio":
        moved = table.present & ~inf & (table.values["ratio"] != 0)
        inf &= np.logical_or.accumulate(moved, axis=1)
    always = np.all(inf | ~table.present, axis=1, keepdims=True)
    return np.asarray((nan & table.present) | (inf & ~always))


def _place(step: int, kind: str, position: int, rank: int) -> Place:
    return step, ORDER.index(kind) if kind in ORDER else len(ORDER), position, rank


def _positions(run: MonitorTables, table: TensorSeries) -> list[int]:
    """Return the place of each tensor in the order of computation.

    Gradients come from the last layer on: in the reverse order of the activations or parameters, else of the rows.
    """
    if table.kind not in BACKWARD:
        return list(range(len(table.names)))
    activations = table.kind == "actv_grad"
    for kind in ("actv",) if activations else ("param", "exp_avg"):
        for other in run.of(kind):
            rows = {name: row for row, name in enumerate(other.names)}
            wanted = [name.replace("put_grad", "put") if activations else name for name in table.names]
            if all(name in rows for name in wanted):
                return [-rows[name] for name in wanted]
    return [row if activations else -row for row in range(len(table.names))]


def _first_unequal(run: MonitorTables, reference: MonitorTables) -> list[Found]:
    """Return the first value that is not the same in both runs."""
    found: list[Found] = []
    for mine, base in pairs(run, reference):
        assert base is not None
        places = _positions(run, mine)
        for word in mine.values.keys() & base.values.keys():
            differs = mine.present & base.present & ~same(mine.values[word], base.values[word])
            for column in np.flatnonzero(differs.any(axis=0))[:1]:
                at = min(np.flatnonzero(differs[:, column]).tolist(), key=places.__getitem__)
                value, golden = (f"{one.values[word][at, column]:.9g}" for one in (mine, base))
                step, row = finding(mine, mine.names[at], int(mine.steps[column]), value, golden, word)
                row = dataclasses.replace(row, place=f"first unequal, {row.place}", evidence="")
                found.append((_place(step, mine.kind, places[at], mine.rank), row))
    return [min(found, key=lambda one: one[0])] if found else []


def _reductions(run: MonitorTables) -> list[Found]:
    """Return the tensors whose reduced mean is neither the mean nor the sum of the ranks, as that of most is.

    Where elements cancel, the mean is compared by the size of a mean of independent elements, RMS / sqrt(n).
    """
    tables, reduced = run.of("grad_unreduced"), run.of("grad_reduced")
    if len(tables) < 2 or not reduced or "mean" not in reduced[0].values:
        return []
    whole, *parts = aligned(reduced[0], *tables)
    total, target = np.sum([part.values["mean"] for part in parts], axis=0), whole.values["mean"]
    least = _size_of_means(whole)
    with np.errstate(all="ignore"):
        usable = np.isfinite(total) & np.isfinite(target) & (total != 0)
        clear = usable & (np.abs(total) >= least)
        ratio = float(np.median(np.abs(target / total)[clear])) if clear.any() else 1.0
        summed = abs(math.log(max(ratio, 1e-300))) < abs(math.log(max(ratio, 1e-300) * len(tables)))
        wanted = total if summed else total / len(tables)
        sizes = np.abs(target - wanted) / np.maximum(np.maximum(np.abs(wanted), least), 1e-300) / ROUNDING
    found = []
    for at, name in enumerate(whole.names):
        size = float(np.median(sizes[at, usable[at]])) if usable[at].sum() >= FEWEST else 0.0
        if size > DEPARTS:
            column = int(np.flatnonzero(usable[at])[0])
            golden = f"{'sum' if summed else 'mean'} {wanted[at, column]:.6g}"
            value, step = float(target[at, column]), int(whole.steps[column])
            step, row = finding(whole, name, step, value, golden, "mean", size, DEPARTS)
            found.append((_place(step, "grad_reduced", -at, 0), row))
    return found


def _size_of_means(table: TensorSeries) -> Floats:
    """Return RMS / sqrt(n) of each tensor and step, which is RMS^2 / norm; 0 where the table has no std."""
    if "std" not in table.values or "norm" not in table.values:
        return np.zeros(table.present.shape)
    squares = table.values["mean"] ** 2 + table.values["std"] ** 2
    with np.errstate(all="ignore"):
        return np.nan_to_num(squares / table.values["norm"], nan=0.0, posinf=0.0)


DESCRIPTION = """
List the first anomaly of each monitored tensor, and where two runs depart (sections 4.6 and 4.7 of the guide). With two
runs the first is the reference. Files are those of the monitor or of msProbe: rank<r>/<kind>_<first>-<last>.csv. Writes
trend.html with a heat map, and trend.json. The exit status is 0 for every result, and 1 where files cannot be used.
"""
LISTED = 20  # rows in the terminal
COLUMNS, MAPS = 180, 24  # steps of a heat map, each the most extreme of several in a long run; maps of a page
DeviationMap = tuple[str, Floats, TensorSeries]  # name, deviations (tensors, steps), table
COLORS = [[0, "#2166ac"], [0.5, "#f7f7f7"], [1, "#b2182b"]]  # below, as and above the expected value
COLOR_BAR = {
    "orientation": "h",
    "y": 1,
    "yanchor": "bottom",
    "thickness": 10,
    "title": {"text": "scales", "side": "top"},
}


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
    title = "Trends of " + " against ".join(map(str, paths[::-1]))
    page = write_trend(rows, tested, title, maps, folder)
    more = [f"{len(rows) - LISTED} more rows are in {page}"] if len(rows) > LISTED else []
    steps = [row.place.partition("step ")[2].partition(",")[0] for row in rows if "step " in row.place]
    commands = [record(path, int(steps[0])) for path in paths] if steps else ["nothing"]
    table = text_table(rows[:LISTED])
    return [title, "", *table, *more, tested, f"wrote {page}", *(f"next: {one}" for one in commands)]


def write_trend(
    rows: Sequence[TableRow], tested: str, title: str, maps: Sequence[DeviationMap], folder: Path
) -> Path:
    """Write trend.html, and the rows as trend.json, into the folder. Returns the path of the page."""
    page = folder / "trend.html"
    kind = rows[0].call.partition(" ")[0] if rows else ""
    first = sorted(maps, key=lambda one: one[2].kind != kind)  # the map of the first row is shown first
    table = Table(HEADINGS, [row.cells for row in rows])
    blocks: list[Block] = [Paragraph(tested), table, Figure("tensors", heat_map(first))]
    steps = {step for _, _, table in maps if table.kind in KINDS for step in table.steps.tolist()}
    content = {"title": title, "tested": tested, "steps": len(steps), "rows": [row.as_json for row in rows]}
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "trend.json", content)
        page.write_text(render_html(Document(title, blocks)), encoding="utf-8")
    return page


def deviation_maps(run: MonitorTables, reference: MonitorTables | None) -> list[DeviationMap]:
    """Return the first tested statistic of each kind and rank."""
    found = []
    for table, other in pairs(run, reference):
        for word, quantity in list(quantities(table).items())[:1]:
            name = f"{table.kind}, {word}" + (f", rank {table.rank}" if table.rank else "")
            found.append((name, deviations(table, word, quantity, other)[0], table))
    return found


def heat_map(maps: Sequence[DeviationMap]) -> dict[str, Any] | None:
    """Return the figure: scales by tensor and step, a kind and rank at a time. Not finite is the end of the scale."""
    options: list[dict[str, Any]] = []
    for name, units, table in maps[:MAPS]:
        extreme = np.where(not_finite(table), 2 * LIMIT, np.clip(units, -2 * LIMIT, 2 * LIMIT))
        group = -(-len(table.steps) // COLUMNS)
        parts = [extreme[:, at : at + group] for at in range(0, len(table.steps), group)]
        largest = np.stack([_extreme(part) for part in parts], axis=1)[::-1].round(2)
        data = {
            "x": table.steps[::group].tolist(),
            "y": [escape_html(one) or name for one in table.names[::-1]],
            "z": [[None if math.isnan(value) else value for value in row] for row in largest.tolist()],
        }
        height = 120 + 14 * max(4, len(table.names))
        options.append({"name": name, "data": [data], "layout": {"height": height}})
    if not options:
        return None
    first = options[0]
    text = "%{y}<br>step %{x}: %{z} scales<extra></extra>"
    map_of = {"type": "heatmap", "coloraxis": "coloraxis", "hovertemplate": text} | first["data"][0]
    rows = {"type": "category", "automargin": True, "showgrid": False, "dtick": 1, "tickfont": {"size": 10}}
    return figure(
        [map_of],
        first["layout"]["height"],
        (120, 10, 60, 30),
        {"yaxis": {"tickfont": {"size": 8}}},
        [{"label": "Kind", "options": options}],
        coloraxis={"cmin": -2 * LIMIT, "cmax": 2 * LIMIT, "colorscale": COLORS, "colorbar": COLOR_BAR},
        xaxis={"tickprefix": "step ", "showtickprefix": "first"},
        yaxis=rows,
    )


def _extreme(part: Floats) -> Floats:
    """Return the value of the largest magnitude of each row; NaN where a row has none."""
    sizes = np.where(np.isnan(part), -1.0, np.abs(part))
    return np.take_along_axis(part, sizes.argmax(axis=1)[:, None], axis=1)[:, 0]
