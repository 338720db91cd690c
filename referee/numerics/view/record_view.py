"""Write the view as one HTML file that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from referee.numerics.compare.compare_records import Comparison
from referee.numerics.compare.compared_rows import CallRow, Cell
from referee.numerics.compare.comparison_page import comparison_blocks
from referee.numerics.compare.first_divergence import StepComparison
from referee.numerics.compare.matched_calls import NameMap
from referee.numerics.compare.row_tree import RowTree, stack_of
from referee.numerics.record.read_record import Call, StepRecord, Value, find_records, read_record
from referee.numerics.rows import format_number
from referee.numerics.text_files import writing
from referee.pages.document import Block, BulletList
from referee.pages.html_page import html_file, render_blocks, script_json
from referee.pages.markup import Code, Text, escape_html, to_html

# The data of the view: the calls of each step and rank as a tree, outer calls before those within them.


CRITICAL, HIGH, MEDIUM = "critical", "high", "medium"
LEVELS = (CRITICAL, HIGH, MEDIUM)
JUMP = 100.0  # times the norm of the inputs

# Inputs that may hold anything, because the function overwrites them.
OVERWRITTEN = {
    "Tensor.masked_fill_": ("0",),
    "Distributed.recv": ("0", "tensor"),
    "Distributed.all_gather": ("0",),
    "Distributed.reduce_scatter": ("0", "output"),
    "Distributed._reduce_scatter_base": ("0",),
    "Distributed.all_gather_into_tensor": ("0",),
    "Distributed.reduce_scatter_tensor": ("0",),
}
UNINITIALISED = ("Torch.empty", "Torch.empty_like", "Torch.empty_strided")


def overflow_level(call: Call | None) -> str:
    """Return the level of a call, "" for none."""
    if call is None or call.path in UNINITIALISED:
        return ""
    allowed = OVERWRITTEN.get(call.path, ())
    bad_inputs = [place for place in _abnormal(call.inputs) if place.partition(".")[0] not in allowed]
    bad_outputs = _abnormal(call.outputs)
    if bad_outputs:
        return HIGH if bad_inputs else CRITICAL
    if bad_inputs:
        return MEDIUM
    return HIGH if _jumps(call) else ""


def _abnormal(values: Mapping[str, Value]) -> list[str]:
    return [place for place, value in values.items() if value.dtype and not value.finite]


def _jumps(call: Call) -> bool:
    before, after = _largest_norm(call.inputs.values()), _largest_norm(call.outputs.values())
    return before is not None and after is not None and after > JUMP * (before or 1.0)


def _largest_norm(values: Iterable[Value]) -> float | None:
    norms = [value.norm for value in values if value.norm is not None and not math.isnan(value.norm)]
    return max(norms, default=None)


SINGLE = "recorded"  # the grade of a call that is not compared


def comparison_tree(comparison: Comparison, names: NameMap) -> dict[str, Any]:
    """Return the data of a comparison. names: the map of names that it used."""
    return {
        "target": str(comparison.target),
        "golden": str(comparison.golden),
        "map": names,
        "steps": [_of_step(step) for step in comparison.steps],
    }


def _of_step(step: StepComparison) -> dict[str, Any]:
    found = step.divergence
    data = _Tree(step.place, step.tree, found.row if found else None).data()
    return {**data, "why": found.evidence if found else ""}


def record_tree(path: Path) -> dict[str, Any]:
    """Return the data of one record. NumericsError where it cannot be used."""
    steps = []
    for place, folder in find_records(path).items():
        record = read_record(folder)
        rows = [CallRow(call, None, grade=SINGLE) for call in record.calls.values()]
        steps.append(_Tree("" if place == "." else place, RowTree(rows, record, record), None).data())
    return {"target": str(path), "golden": "", "map": {}, "steps": steps}


def first_critical(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return the first call of the level "critical" with none such within it; "" for none. nodes: in tree order."""
    found: Mapping[str, Any] | None = None
    for node in nodes:
        if found and node["depth"] <= found["depth"]:
            break
        if node["levels"][0] == CRITICAL:
            found = node
    return str(found["target"]) if found else ""


class _Tree:
    """The tree of a step of a rank. golden: the target itself, of one record."""

    def __init__(self, place: str, tree: RowTree, first: CallRow | None) -> None:
        self.place, self.tree, self.first = place, tree, first
        self.stacks: dict[tuple[str, ...], int] = {}
        self.inner: dict[int | None, list[CallRow]] = {}
        for row in tree.rows:
            outer = next(self.tree.around(row), None)
            self.inner.setdefault(id(outer) if outer else None, []).append(row)

    def data(self) -> dict[str, Any]:
        order = list(self._within(None, 0))
        firsts = (number for number, (row, _) in enumerate(order) if row is self.first)
        return {
            "place": self.place,
            "first": next(firsts, None),
            "nodes": [self._node(row, depth) for row, depth in order],
            "stacks": [list(lines) for lines in self.stacks],
        }

    def _within(self, outer: CallRow | None, depth: int) -> Iterator[tuple[CallRow, int]]:
        """Yield the rows within a row and their depths, each before those within it."""
        for row in self.inner.get(id(outer) if outer else None, []):
            yield row, depth
            yield from self._within(row, depth + 1)

    def _node(self, row: CallRow, depth: int) -> dict[str, Any]:
        target, golden = row.target, row.golden
        call = row.call
        units = max(row.units("output"), row.units("gradient"))
        node: dict[str, Any] = {
            "depth": depth,
            "target": target.name if target else "",
            "golden": golden.name if golden else "",
            "labels": ["" if one is None else _label(one) for one in (target, golden)],
            "kind": "module" if call.is_module else "function",
            "backward": call.backward,
            "grade": row.grade,
            "levels": [overflow_level(target), overflow_level(golden)],
            "values": self._values(row),
            "settings": _settings(target, golden),
            "differs": row.differs,
            "stacks": [self._stack(target, self.tree.target), self._stack(golden, self.tree.golden)],
        }
        if row.grade not in (SINGLE, "unmatched"):
            node["units"] = format_number(units)
        if row.replayed:
            node["replayed"] = [format_number(one) for one in row.replayed]
        if row.grade == "unmatched":
            node["key"] = call.forward_name
            if call.is_module and not call.number:
                node["path"] = call.path  # with all calls within it
        return node

    def _values(self, row: CallRow) -> list[list[str]]:
        """Return (place, target, golden, units) of each recorded tensor."""
        cells: dict[tuple[str, str], Cell] = {(cell.side, cell.place): cell for cell in row.cells}
        found = []
        for side in ("input", "parameter", "output", "gradient"):
            mine, others = (call.sides[side] if call else {} for call in (row.target, row.golden))
            for place in {**others, **mine}:
                pair = mine.get(place), others.get(place)
                if not any(value is not None and value.dtype for value in pair):
                    continue
                cell = cells.get((side, place))
                text = ""
                if cell is not None:
                    units = format_number(row.in_units(cell.difference.error))
                    text = "equal" if cell.difference.equal else cell.difference.what or units
                found.append([f"{side} {place}", *(_describe(value) for value in pair), text])
        return found

    def _stack(self, call: Call | None, record: StepRecord) -> int | None:
        lines = stack_of(call, record)
        return self.stacks.setdefault(lines, len(self.stacks)) if lines else None


def _settings(target: Call | None, golden: Call | None) -> list[list[str]]:
    """Return (name, target, golden) of the settings of a module and the plain arguments of a call."""
    sides = [_plain(call) for call in (target, golden)]
    return [[name, *(side.get(name, "") for side in sides)] for name in {**sides[1], **sides[0]}]


def _plain(call: Call | None) -> dict[str, str]:
    if call is None:
        return {}
    found = {str(name): str(value) for name, value in call.settings.items()}
    return found | {
        f"argument {place}": value.describe() for place, value in call.inputs.items() if not value.dtype
    }


def _describe(value: Value | None) -> str:
    if value is None:
        return ""
    return value.describe() + (f", checksum {value.checksum}" if value.checksum else "")


def _label(call: Call) -> str:
    name = ".".join(filter(None, (call.path, call.type)))
    return f"{name} #{call.number}" if call.number or not call.is_module else name


HERE = Path(__file__).parent
SKELETON = """
<div id="tools" class="tools"></div>
<div class="panes">
<div><div id="heads" aria-hidden="true"></div>
<div id="tree" role="tree" tabindex="0" aria-label="calls"><div id="space"><div id="rows"></div></div></div></div>
<aside id="details" aria-label="the chosen call"></aside>
</div>
<section id="matching"></section>
<noscript><p class="note">The tree needs JavaScript. compare_result.csv has every call of a comparison.</p></noscript>
"""


def write_comparison_view(comparison: Comparison, names: NameMap, path: Path) -> None:
    """Write the first divergence, further differences, and the tree of two compared records."""
    subtitle: Text = ("target ", Code(str(comparison.target)), ", golden ", Code(str(comparison.golden)))
    title = f"Comparison of two records: {comparison.verdict_text}"
    _write(path, title, subtitle, comparison_blocks(comparison), comparison_tree(comparison, names))


def write_record_view(record: Path, path: Path) -> str:
    """Write the tree of one record. NumericsError where it cannot be used or the page cannot be written.

    Returns the first call with normal inputs and a NaN or an infinity in its outputs, with none such within; or "".
    """
    data = record_tree(record)
    calls = sum(len(step["nodes"]) for step in data["steps"])
    bad = [node for step in data["steps"] for node in step["nodes"] if node["levels"][0]]
    lines = [f"{calls} calls in {len(data['steps'])} records", f"{len(bad)} calls with an overflow level"]
    _write(path, "Tree of a record", Code(str(record)), [BulletList(lines, small=True)], data)
    return next(filter(None, (first_critical(step["nodes"]) for step in data["steps"])), "")


def _write(path: Path, title: str, subtitle: Text, blocks: Sequence[Block], data: dict[str, Any]) -> None:
    header = f"<header><h1>{escape_html(title)}</h1><p>{to_html(subtitle)}</p></header>"
    script = (HERE / "tree.js").read_text(encoding="utf-8")
    content = f'<script type="application/json" id="tree-data">{script_json(data)}</script>'
    scripts = f"{content}\n<script>{script}</script>\n"
    body = f"{header}\n{render_blocks(blocks)}{SKELETON}"
    page = html_file(title, body, scripts, (HERE / "tree.css").read_text(encoding="utf-8"))
    with writing(path, "give another path by -o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
