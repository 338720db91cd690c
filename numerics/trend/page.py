"""The page of the trends: one HTML file that loads nothing, with every map of kind, statistic, rank and run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from numerics.diagnose.loss_files import Curve
from numerics.trend.anomalies import POSITIVE, Anomalies, aligned
from numerics.trend.conclusion import Trend, describe, sentences
from numerics.trend.history import ALARM, BEFORE, WINDOW, Flags, Floats
from numerics.trend.pack import ASINH, LINEAR, Scale, pack, scale_of
from numerics.trend.tables import Monitored, TrendTable, kind_order
from pages.components import render_blocks
from pages.document import Block, BulletList, Details, Paragraph, Section
from pages.markup import Code, Strong, Text, escape_html, to_html
from pages.page import html_file, script_json

HERE = Path(__file__).parent
SCRIPTS = ("cells.js", "draw.js", "controls.js")
CELLS = 4_000_000  # of all maps: two codes of 16 bits each
LISTED = 300  # anomalies on the page
TRAINING, VALUE, UNITS = "training", "value", "deviation"
FIRST, SECOND, DIFFERENCE = 0, 1, 2  # sides of a map
SKELETON = """
<div id="tools" class="tools"></div>
<p id="where" class="soft" role="status"></p>
<div id="maps" tabindex="0" role="application" aria-describedby="keys"></div>
<div id="legend"></div>
<canvas id="curve" role="img"></canvas>
<p id="keys" class="note">Click a cell for its curve; drag to zoom, double-click for all steps. Keys: arrows move, + and
- zoom, 0 shows all steps, n and p go to the next and the previous anomaly. A pixel shows the most
extreme value of its steps. The ring is the first anomaly; the dashed lines are the chosen cell.</p>
<section id="anomalies"></section>
<section id="table"></section>
<noscript><p class="note">The maps need JavaScript. trend.json has every anomaly and every share.</p></noscript>
"""


@dataclass
class Map:
    """One heat map. values, present: (tensors, steps) of the kind. group: values that share a scale."""

    statistic: str
    rank: int
    side: int
    values: Floats
    present: Flags


@dataclass
class Kind:
    """All maps of a kind, with common names and steps."""

    kind: str
    like: TrendTable
    maps: list[Map] = field(default_factory=list)


def trend_page(trend: Trend, commands: Sequence[str]) -> tuple[str, list[str]]:
    """Return the page and notes on what it leaves out."""
    kinds = list(_kinds(trend))
    rows = sum(len(kind.like.names) * len(kind.maps) for kind in kinds)
    columns = max(1, CELLS // max(rows, 1))
    scripts: list[str] = []
    packed = [_packed(kind, columns, scripts, _limit(trend)) for kind in kinds]
    notes = [note for one in (trend.reference, trend.run) if one for note in one.notes]
    groups = {kind["kind"]: kind["group"] for kind in packed if kind["group"] > 1}
    if groups:
        text = ", ".join(f"{group} of {name}" for name, group in groups.items())
        notes.append(
            f"a cell of the page holds the extremes of several recorded steps: {text}; with fewer kinds or statistics "
            "it holds fewer"
        )
    data = {
        "runs": [one.name for one in (trend.reference, trend.run) if one],
        "kinds": packed,
        "anomalies": [
            {
                "step": one.step,
                "kind": one.kind,
                "rank": one.rank,
                "name": one.name,
                "text": describe(one),
                "statistic": one.statistic,
            }
            for one in trend.anomalies.found[:LISTED]
        ],
        "count": len(trend.anomalies.found),
        "shown": _first_kind(trend, [kind.kind for kind in kinds]),
    }
    return _html(trend, commands, data, scripts, notes), notes


def _html(trend: Trend, commands: Sequence[str], data: Any, scripts: list[str], notes: Sequence[str]) -> str:
    runs = " against ".join(one.name for one in (trend.run, trend.reference) if one)
    title = f"Trends of {runs}"
    said = sentences(trend)
    blocks: list[Block] = [
        Paragraph(Strong(f"{said[0]}.", bad=bool(trend.anomalies.found))),
        *(Paragraph(f"{one}.") for one in said[1:]),
        Section("Next", [BulletList([Code(one) for one in commands] or ["nothing"])]),
        Section("Maps", [Paragraph(_tested(trend))]),
    ]
    after: list[Block] = [
        Section("Notes", [BulletList(list(notes), small=True)]),
        Details("What is an anomaly?", [Paragraph(text) for text in _method(trend)]),
    ]
    content = f'<script type="application/json" id="trend-data">{script_json(data)}</script>\n'
    parts = [(HERE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '<script>(() => {\n"use strict";\n' + "\n".join(parts) + "})();</script>\n"
    header = f"<header><h1>{escape_html(title)}</h1><p>{to_html(_paths(trend))}</p></header>"
    body = f"{header}\n{render_blocks(blocks)}{SKELETON}{render_blocks(after)}"
    style = (HERE / "trend.css").read_text(encoding="utf-8")
    return html_file(title, body, content + "".join(scripts) + script, style)


def _paths(trend: Trend) -> Text:
    if trend.reference is None:
        return Code(str(trend.run.path))
    return (Code(str(trend.run.path)), ", reference ", Code(str(trend.reference.path)))


def _tested(trend: Trend) -> str:
    tensors = sum(len(table.names) for table in trend.run.tables.values())
    steps = sorted(
        {step for table in trend.run.tables.values() for step in (int(table.steps[0]), int(table.steps[-1]))}
    )
    return (
        f"{tensors:,} tensors of {len(trend.run.tables)} tables, steps {steps[0]:,} to {steps[-1]:,}. Norms and "
        "similar statistics have logarithmic colors"
    )


def _method(trend: Trend) -> list[str]:
    texts = [
        f"A value is compared with the median of the {BEFORE} values before it. Its deviation is counted in medians: "
        f"the median deviation of up to {WINDOW} values before it. Over the limit it is anomalous, and where it is not "
        "finite. Successive anomalous steps of a tensor count once.",
        "The limit: if the largest twentieth of the deviations before a step has an exponential tail or a lighter one, "
        f"a clean run has any alarm with a probability of at most {ALARM:g} (Bonferroni over "
        f"{trend.anomalies.tests:,} tested values).",
    ]
    if trend.reference:
        texts.append(
            "With a reference, a value is compared with that of the reference at the same step, in units of the "
            "reference's own deviations. Both runs need the same batches. The anomalies are those of the run, not of "
            "the reference."
        )
    return texts


def _limit(trend: Trend) -> float:
    """Return the smallest limit, which the colors of deviations end at."""
    limits = [
        float(np.nanmin(one.limits))
        for one in trend.anomalies.histories.values()
        if np.isfinite(one.limits).any()
    ]
    return min(limits, default=20.0)


def _first_kind(trend: Trend, kinds: Sequence[str]) -> dict[str, Any]:
    """Return what the page shows at first: the first anomaly, else the gradients."""
    first = trend.anomalies.first
    if first is not None:
        return {
            "kind": first.kind,
            "statistic": first.statistic,
            "rank": first.rank,
            "name": first.name,
            "step": first.step,
        }
    wanted = trend.attribution.kind or next((kind for kind in kinds if kind != TRAINING), kinds[0])
    found: dict[str, Any] = {"kind": wanted}
    if trend.reference and trend.attribution.steps:
        found |= {"name": trend.attribution.carriers[0].name, "step": trend.attribution.steps[0]}
    return found


def _kinds(trend: Trend) -> Iterator[Kind]:
    runs = [one for one in (trend.reference, trend.run) if one]
    found = trend.own or [trend.anomalies]
    if any(run.losses or run.norms for run in runs):
        curves = [_training(run) for run in runs]
        yield _kind(TRAINING, curves, [None] * len(runs), None)
    names = sorted({kind for run in runs for kind, _ in run.tables}, key=kind_order)
    for name in names:
        yield _kind(
            name, [run.of_kind(name) for run in runs], found, trend.anomalies if trend.reference else None
        )


def _training(run: Monitored) -> dict[int, TrendTable]:
    """Return loss and gradient norm as a table of rank 0."""
    curves: dict[str, Curve] = {"loss": run.losses, "gradient norm": run.norms}
    rows = {name: curve for name, curve in curves.items() if curve}
    steps = np.array(sorted({step for curve in rows.values() for step in curve}), dtype=np.int64)
    values = np.full((len(rows), len(steps)), np.nan, dtype=np.float32)
    present = np.zeros(values.shape, dtype=bool)
    for row, curve in enumerate(rows.values()):
        places = np.searchsorted(steps, list(curve))
        values[row, places] = list(curve.values())
        present[row, places] = True
    return {0: TrendTable(TRAINING, 0, list(rows), steps, {VALUE: values}, present)}


def _kind(
    name: str,
    runs: Sequence[dict[int, TrendTable]],
    found: Sequence[Anomalies | None],
    both: Anomalies | None,
) -> Kind:
    """Bring all tables of a kind to common names and steps. found: of each run; both: of one against the other."""
    tables = [table for tables in runs for table in tables.values()]
    names = list(dict.fromkeys(one for table in tables for one in table.names))
    steps = np.unique(np.concatenate([table.steps for table in tables]))
    like = TrendTable(name, 0, names, steps, {}, np.zeros((len(names), len(steps)), dtype=bool))
    result = Kind(name, like)
    for rank in sorted({rank for tables in runs for rank in tables}):
        sides: list[dict[str, Map]] = []
        for side, tables_of in enumerate(runs):
            made = {}
            if table := tables_of.get(rank):
                present = aligned(table, table.present.astype(np.float32), like) > 0
                for word, values in {**table.values, **_units(found[side], table)}.items():
                    made[word] = Map(word, rank, side, aligned(table, values, like), present)
            sides.append(made)
            result.maps += made.values()
        if len(sides) == 2:
            table = runs[SECOND].get(rank)
            units = _units(both, table) if table else {}
            for word in [word for word in sides[FIRST] if word in sides[SECOND]]:
                one, other = sides[FIRST][word], sides[SECOND][word]
                if word == UNITS and table is not None and units:
                    values = aligned(table, units[UNITS], like)
                else:
                    values = _difference(one.values, other.values, word in POSITIVE or word == VALUE)
                result.maps.append(Map(word, rank, DIFFERENCE, values, one.present & other.present))
    return result


def _units(found: Anomalies | None, table: TrendTable | None) -> dict[str, Floats]:
    """Return the deviations of the statistic that is tested first; nothing where none was."""
    if found is None or table is None:
        return {}
    for (kind, rank, _), one in found.histories.items():
        if (kind, rank) == (table.kind, table.rank):
            return {UNITS: one.units}
    return {}


def _difference(one: Floats, other: Floats, positive: bool) -> Floats:
    """Return second minus first; of positive statistics the binary logarithm of their ratio."""
    with np.errstate(all="ignore"):
        found = np.log2(other.astype(np.float64) / one) if positive else other.astype(np.float64) - one
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return np.where(same, 0.0, found).astype(np.float32)


def _packed(kind: Kind, columns: int, scripts: list[str], limit: float) -> dict[str, Any]:
    """Append the scripts with the codes of a kind's maps; return the kind as plain data."""
    steps = kind.like.steps
    group = -(-len(steps) // columns)
    scales: dict[tuple[str, bool], Scale] = {}
    maps = []
    for one in kind.maps:
        key = (one.statistic, one.side == DIFFERENCE)
        present = one.present & (np.isfinite(one.values) if one.statistic == UNITS else True)
        if key not in scales:
            same = [other for other in kind.maps if (other.statistic, other.side == DIFFERENCE) == key]
            scales[key] = _scale(key, [other.values for other in same])
        text, single = pack(scales[key].codes(one.values, present), group)
        identifier = f"map{len(scripts)}"
        scripts.append(f'<script type="text/plain" id="{identifier}">{text}</script>\n')
        maps.append(
            {
                "statistic": one.statistic,
                "rank": one.rank,
                "side": one.side,
                "id": identifier,
                "single": single,
                "scale": scales[key].as_json(),
                "ratio": one.side == DIFFERENCE and (one.statistic in POSITIVE or one.statistic == VALUE),
                "limit": limit if one.statistic == UNITS else None,
            }
        )
    return {
        "kind": kind.kind,
        "names": kind.like.names,
        "starts": steps[::group].tolist(),
        "ends": [*(steps[group - 1 :: group].tolist()), *([int(steps[-1])] if len(steps) % group else [])],
        "group": group,
        "maps": maps,
    }


def _scale(key: tuple[str, bool], parts: list[Floats]) -> Scale:
    statistic, is_difference = key
    if not is_difference:
        return scale_of({UNITS: "units", VALUE: "norm"}.get(statistic, statistic), parts)
    if statistic in POSITIVE or statistic == VALUE:
        finite = np.concatenate([part[np.isfinite(part)].ravel() for part in parts])
        size = float(np.abs(finite).max()) if len(finite) else 0.0
        return Scale(LINEAR, -(size or 1.0), size or 1.0)
    found = scale_of("mean", parts)
    size = max(abs(found.low), abs(found.high))
    return Scale(ASINH, -size, size, found.unit if math.isfinite(found.unit) else 1.0)
