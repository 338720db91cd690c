"""Show what the check of operations found: terminal, oracle.json and oracle.html."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from numerics.dump_files import finite, write_json, writing
from numerics.oracle.parties import GRADES, RESULTS, Party
from numerics.oracle.results import (
    EXACT,
    NOTE,
    ROUNDING,
    VERDICTS,
    WRONG,
    Check,
    Skipped,
    as_json,
    worst_first,
)
from numerics.oracle.rounding_model.bounds import OTHER, RULES
from numerics.oracle.rounding_model.measure import DELTA, EDGES
from pages.document import (
    HTML,
    TERMINAL,
    Block,
    BulletList,
    Details,
    Document,
    Figure,
    Note,
    Only,
    Paragraph,
    Section,
    Table,
)
from pages.markup import Code, ColorLabel, Text
from pages.page import render_html
from pages.plots import figure

COLORS = {WRONG: 7, NOTE: 5, ROUNDING: 1, EXACT: 2}
MOST_ROWS, MOST_BARS = 12, 24  # in the terminal; in the figure
MEANING = (
    "Units: the Euclidean distance to float64, relative, in machine epsilons of the dtype. Max ulp: the largest "
    "distance of one element in units in the last place, which is large where float64 has almost 0.",
    "wrong: the error is beyond what rounding allows, or the arguments are.",
    "note: a fact about extreme inputs, such as flushing to zero.",
    "rounding: within what rounding allows. exact: the nearest number of the dtype everywhere.",
)


@dataclass(frozen=True)
class OracleReport:
    """The results of a check. source: of the operations, in words. pairs: with a benchmark device; alone: without.

    recorded: names of all operations, checked or not.
    """

    device: str
    source: str
    checks: list[Check]
    skipped: list[Skipped]
    benchmark: str = ""
    pairs: list[Party] = field(default_factory=list)
    alone: int = 0
    recorded: list[str] = field(default_factory=list)

    @property
    def not_checked(self) -> Counter[str]:
        """Return how many of the recorded operations have no check, by the first reason."""
        checked = {check.name for check in self.checks}
        reasons: dict[str, str] = {}
        for skip in self.skipped:
            reasons.setdefault(skip.name, skip.reason)
        return Counter(
            reasons.get(name, "nothing to compare") for name in self.recorded if name not in checked
        )

    @property
    def counts(self) -> str:
        """Return the sum of operations: "15 operations: 13 checked, 2 not checked"."""
        left = self.not_checked.total()
        return f"{len(self.recorded)} operations: {len(self.recorded) - left} checked, {left} not checked"

    @property
    def wrong(self) -> list[Check]:
        return [check for check in worst_first(self.checks) if check.wrong]

    @property
    def verdict(self) -> str:
        """Return "wrong", "rounding" or "exact": the worst of all checks."""
        found = {check.verdict for check in self.checks} - {NOTE}
        return next((verdict for verdict in VERDICTS if verdict in found), EXACT)


def report_document(report: OracleReport) -> Document:
    """Return the document: the wrong operations first, then every check, the histogram and the table of bounds."""
    checks = worst_first(report.checks)
    counts = Counter(check.verdict for check in checks)
    left = {skip.name for skip in report.skipped} - {check.name for check in checks}
    partly = [skip for skip in report.skipped if skip.name not in left]
    numbers = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    lines: list[Text] = [
        f"{report.counts}.",
        *(f"not checked, {count}: {reason}" for reason, count in report.not_checked.most_common()),
        f"{len(checks)} checks: {numbers}.",
        *(f"{count} runs of checked operations skipped: {reason}" for reason, count in _reasons(partly)),
    ]
    notes = [check for check in checks if check.verdict == NOTE]
    blocks: list[Block] = [
        BulletList(lines),
        Section("Wrong", [BulletList([_finding(check) for check in report.wrong[:MOST_ROWS]])]),
        *_three_parties(report),
        Section("Operations", [_by_operation(checks)]),
        Section(
            "Notes",
            [BulletList([f"{check.call}, {check.how}: {check.remark}" for check in notes[:MOST_ROWS]])],
        ),
        Only(
            (HTML,),
            [
                Section(
                    "Error in units in the last place", [Figure("ulps", _histogram(checks)), Note(_CAPTION)]
                ),
                Section("Checks", [Note(" ".join(MEANING)), _table(checks)]),
                Details("What rounding allows: the table of operations", [_bounds()]),
                Details("Skipped", [BulletList([f"{skip.name}: {skip.reason}" for skip in report.skipped])]),
            ],
        ),
        Paragraph(next_step(report)),
    ]
    return Document(
        f"Operations against float64: {report.verdict}", blocks, f"{report.device}; {report.source}"
    )


_CAPTION = (
    "Share of the elements by the distance to float64 in units in the last place, the worst calls at the top. Up to "
    "0.5: the nearest number of the dtype."
)


def next_step(report: OracleReport) -> str:
    """Return what to do next."""
    if not report.wrong:
        return (
            "Next: no operation is beyond rounding; compare two records, or watch the run with the monitor."
        )
    first = report.wrong[0]
    return (
        f"Next: replace {first.label} by small operations, compute it in float32, or move it to the CPU (section "
        "2.4.2), and see whether the symptom vanishes."
    )


def _finding(check: Check) -> Text:
    measured = check.measured
    error = measured.why or (
        f"{_number(check.units)} units of rounding, {_number(measured.ratio)} times what rounding allows"
    )
    because = f" ({check.derivation})" if check.derivation else ""
    return (
        Code(check.name),
        f", {check.direction}, {check.part}, {check.dtype}, {check.how}: {error}{because}",
    )


def _by_operation(checks: Sequence[Check]) -> Table:
    """List each function with its worst check. checks: the worst first."""
    worst: dict[str, Check] = {}
    for check in checks:
        worst.setdefault(check.label, check)
    return Table.of(
        list(worst.values()),
        {
            "Operation": lambda check: check.label.rpartition(".")[2],
            "Units": lambda check: _number(check.units),
            "Error / allowed": lambda check: _number(check.measured.ratio),
            "Worst result": lambda check: (
                f"{check.direction} {check.part}, {check.how.removeprefix('device, ')}"
            ),
            "Verdict": lambda check: check.verdict,
        },
        (3, 4),
    )


def _table(checks: Sequence[Check]) -> Table:
    headings = ["Call", "Result", "Dtype", "Run", "Units", "Max ulp", "Error / allowed", "Verdict", "Why"]
    rows: list[list[Text]] = [
        [
            Code(check.call),
            check.part,
            check.dtype,
            check.how,
            _number(check.units),
            _number(check.measured.max_ulps),
            _number(check.measured.ratio),
            ColorLabel(check.verdict, COLORS[check.verdict]),
            check.measured.why or check.remark or check.derivation,
        ]
        for check in checks
    ]
    return Table(headings, rows, (1, 2, 3, 7, 8), kinds=[check.verdict for check in checks], name="verdict")


def _three_parties(report: OracleReport) -> list[Block]:
    if not report.benchmark:
        return []
    counts = Counter(pair.grade for pair in report.pairs)
    words = ", ".join(f"{counts[grade]} {grade}" for grade in GRADES if counts[grade])
    missing = f" {report.alone} checks have no partner with the same inputs." if report.alone else ""
    rows: list[list[Text]] = [
        [
            pair.check.call,
            f"{pair.check.part}, {pair.check.how}",
            _number(pair.check.measured.distance),
            _number(pair.other.measured.distance),
            pair.grade,
        ]
        for pair in report.pairs
    ]
    headings = ["Operation", "Result", "This device", "Benchmark", "Gap"]
    return [
        Section(
            "Three parties",
            [
                Paragraph(
                    f"Euclidean distance to float64 on the CPU, relative: this device against {report.benchmark}. "
                    f"{words or 'No common check'}.{missing}"
                ),
                Only((TERMINAL,), [Table(headings, rows[:MOST_ROWS], (1, 4))]),
                Only((HTML,), [Table(headings, rows, (1, 4))]),
            ],
        )
    ]


def _bounds() -> Table:
    return Table.of(
        [*RULES, OTHER],
        {
            "Kind": lambda rule: rule.kind,
            "Operations of torch.ops.aten": lambda rule: _shorten(rule.names),
            "Error of the inputs, n = 1000": lambda rule: _number(rule.inputs(1000)),
            "Error of the result, n = 1000": lambda rule: _number(rule.outputs(1000)),
            "Why": lambda rule: rule.why,
        },
        (1, 4),
    )


def _histogram(checks: Sequence[Check]) -> dict[str, Any] | None:
    """Return a heat map: the worst checks by row, units in the last place by column."""
    listed = [check for check in checks if sum(check.measured.histogram) and check.values != "extreme"][
        :MOST_BARS
    ]
    if not listed:
        return None
    listed = listed[::-1]
    names = [f"{check.call}, {check.part}, {check.how}" for check in listed]
    shares = [
        [count / sum(check.measured.histogram) for count in check.measured.histogram] for check in listed
    ]
    columns = ["0", *(f"≤ {edge:g}" for edge in EDGES[1:]), "more"]
    data = {
        "type": "heatmap",
        "x": columns,
        "y": names,
        "z": [[math.log10(share) if share else None for share in row] for row in shares],
        "customdata": shares,
        "hovertemplate": "%{y}<br>%{x} ulp: %{customdata:.3%}<extra></extra>",
        "colorscale": "Viridis",
        "zmin": -6,
        "zmax": 0,
        "colorbar": {
            "title": {"text": "share"},
            "tickvals": [-6, -4, -2, 0],
            "ticktext": ["1e-6", "1e-4", "1 %", "all"],
        },
    }
    height = 120 + 22 * len(listed)
    return figure(
        [data],
        height,
        (360, 20, 10, 60),
        {"margin": {"l": 120}},
        xaxis={"type": "category"},
        yaxis={"automargin": True},
    )


def results_json(report: OracleReport) -> dict[str, Any]:
    """Return what oracle.json holds."""
    counts = Counter(check.verdict for check in report.checks)
    return {
        "schema": 1,
        "verdict": report.verdict,
        "device": report.device,
        "torch": torch.__version__,
        "source": report.source,
        "operations": {
            "recorded": len(report.recorded),
            "checked": len(report.recorded) - report.not_checked.total(),
            "not_checked": dict(report.not_checked),
        },
        "counts": {verdict: counts[verdict] for verdict in VERDICTS},
        "delta": DELTA,
        "histogram_edges_ulps": list(EDGES),
        "benchmark": report.benchmark,
        "three_parties": [
            {
                "name": pair.check.name,
                "direction": pair.check.direction,
                "part": pair.check.part,
                "how": pair.check.how,
                "distance": finite(pair.check.measured.distance),
                "benchmark_distance": finite(pair.other.measured.distance),
                "grade": pair.grade,
            }
            for pair in report.pairs
        ],
        "skipped": [
            {"name": skip.name, "label": skip.label, "reason": skip.reason} for skip in report.skipped
        ],
        "rows": [as_json(check) for check in worst_first(report.checks)],
    }


def write_report(report: OracleReport, folder: Path) -> list[Path]:
    """Write oracle.json and oracle.html. Returns their paths."""
    data, page = folder / RESULTS, folder / "oracle.html"
    with writing(folder, "give another folder by -o"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(data, results_json(report))
        page.write_text(render_html(report_document(report)), encoding="utf-8")
    return [data, page]


def _reasons(skipped: Sequence[Skipped]) -> list[tuple[str, int]]:
    return Counter(skip.reason for skip in skipped).most_common(3)


def _shorten(names: str) -> str:
    words = names.split()
    return " ".join([*words[:12], *["..."][: len(words) - 12 > 0]])


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinite"
