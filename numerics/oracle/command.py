"""`python -m numerics oracle RECORD [--other RESULTS] -o OUT`: each operation of a step against float64 on the CPU."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numerics.dump_files import finite, read_json, write_json, writing
from numerics.errors import NumericsError
from numerics.rows import HEADINGS, TableRow, text_table
from pages.document import BulletList, Document, Section, Table
from pages.page import render_html

if TYPE_CHECKING:
    from numerics.rounding.operation_checks import Check, Operation, Skipped

DESCRIPTION = """
Run every operation of a recorded step on this machine's device, forward and backward, and measure it against float64 on
the CPU: on the recorded values, or on generated ones of the same shapes, dtypes and ranges. Writes OUT/oracle.json and
OUT/oracle.html. The exit status is 0 for every verdict, also for "wrong"; it is 1 where a record cannot be used.
"""
RESULTS = "oracle.json"
MOST_ROWS = 20  # in the terminal


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add oracle to the commands of `python -m numerics`."""
    parser = commands.add_parser(
        "oracle", description=DESCRIPTION, help="check each operation of a recorded step"
    )
    parser.add_argument(
        "record",
        type=Path,
        help="the record: dump, step or rank; or FILE.py:FUNCTION, whose step is recorded first",
    )
    parser.add_argument("--other", type=Path, help="oracle.json of the benchmark machine, or its folder")
    parser.add_argument(
        "--device", default="", help="by default the accelerator of this machine, else the CPU"
    )
    parser.add_argument(
        "--no-extremes", action="store_true", help="leave out zeros, Inf, NaN, subnormal, large inputs"
    )
    parser.add_argument("-o", "--output_path", type=Path, default=Path("oracle"), help="folder of results")
    parser.set_defaults(run=run_oracle)


def run_oracle(given: argparse.Namespace) -> int:
    from numerics.oracle.recorded_operations import operations
    from numerics.record.record_command import record_factory

    record, source = given.record, f"record {given.record}"
    if ".py:" in str(record):
        record = record_factory(str(record), given.output_path / "record", task="tensor")
    found = operations(record)
    show(check_all(found, source, given.device, given.other, not given.no_extremes), given.output_path)
    return 0


@dataclass(frozen=True)
class OracleReport:
    """The checks of operations on a device."""

    device: str  # in words
    source: str  # of the operations, in words
    checks: list[Check]  # the worst first
    skipped: list[Skipped]
    recorded: list[str]  # names of all operations
    benchmark: str = ""  # the other device, in words
    others: Mapping[tuple[str, ...], float] = field(default_factory=dict)  # its units, see `key`

    @property
    def verdict(self) -> str:
        return "wrong" if any(check.wrong for check in self.checks) else "rounding"

    @property
    def not_checked(self) -> Counter[str]:
        """Return how many of the recorded operations have no check, by the first reason."""
        checked = {check.name for check in self.checks}
        reasons = {skip.name: skip.reason for skip in reversed(self.skipped)}
        return Counter(
            reasons.get(name, "nothing to compare") for name in self.recorded if name not in checked
        )

    @property
    def counts(self) -> str:
        """Return the sum of operations: "15 operations: 13 checked, 2 not checked"."""
        left = self.not_checked.total()
        return f"{len(self.recorded)} operations: {len(self.recorded) - left} checked, {left} not checked"

    def row(self, check: Check) -> TableRow:
        """Return a check as a row: its units, and in the column of the other side those of the benchmark."""
        other = self.others.get(key(vars(check)))
        return TableRow(
            check.name, check.part, f"{check.how} {check.dtype}", check.why, "" if other is None else f"{other:.3g}",
            check.units, check.bound, check.verdict,
        )  # fmt: skip


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the same check of another machine shares; the digest is that of the inputs."""
    return tuple(str(row[name]) for name in ("name", "part", "dtype", "how", "digest"))


def check_all(
    found: Iterable[Operation | Skipped],
    source: str,
    device: str = "",
    other: Path | None = None,
    extremes: bool = True,
) -> OracleReport:
    """Check operations on a device. other: results of the benchmark machine. NumericsError for an unusable device."""
    from numerics.rounding.operation_checks import VERDICTS, Oracle, Skipped, usable_device

    benchmark, others = read_results(other) if other else ("", {})
    chosen = usable_device(device)
    oracle = Oracle(chosen, extremes=extremes)
    names: dict[str, None] = {}  # in order; a name comes again with what was left out of its check
    for operation in found:
        names[operation.name] = None
        if isinstance(operation, Skipped):
            oracle.skipped.append(operation)
        else:
            oracle.check(operation)
    if not oracle.checks:
        raise NumericsError(
            f"{source}: no operation can be checked; fix: record with level mix or L1 (docs/oracle.md)"
        )
    checks = sorted(
        oracle.checks, key=lambda check: (VERDICTS.index(check.verdict), -check.units / (check.bound or 1.0))
    )
    return OracleReport(device_name(chosen), source, checks, oracle.skipped, list(names), benchmark, others)


def read_results(path: Path) -> tuple[str, dict[tuple[str, ...], float]]:
    """Return the device and the units of oracle.json of another machine. NumericsError where it cannot be used."""
    file = path / RESULTS if path.is_dir() else path
    fix = "run the check on the other machine and copy its oracle.json"
    content = read_json(file, fix)
    try:
        rows = [row for row in content["rows"] if row["digest"]]
        return str(content["device"]), {
            key(row): float("inf" if row["units"] is None else row["units"]) for row in rows
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NumericsError(f"{file} holds no results of this check ({error}); fix: {fix}") from error


def device_name(device: Any) -> str:
    """Return the name of a device in words, with torch's version."""
    import torch

    from numerics.describe import device_name as name_of

    name = device.type if device.type == "cpu" else f"{device.type} {name_of(device.type)}"
    return f"{name}, torch {torch.__version__}"


def show(report: OracleReport, folder: Path) -> None:
    """Print the report, and write oracle.json and oracle.html."""
    data, page = folder / RESULTS, folder / "oracle.html"
    with writing(folder, "give another folder by -o"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(data, results_json(report))
        page.write_text(render_html(report_document(report)), encoding="utf-8")
    print(f"Operations against float64: {report.verdict}", f"{report.device}; {report.source}", sep="\n")
    print(*summary(report), *text_table(map(report.row, report.checks[:MOST_ROWS])), sep="\n")
    print(*(f"wrote {path}" for path in (data, page)), sep="\n")


def summary(report: OracleReport) -> list[str]:
    """Return the counts of operations, of what was not checked, and of verdicts."""
    verdicts = Counter(check.verdict for check in report.checks)
    checked = {check.name for check in report.checks}
    partly = Counter(skip.reason for skip in report.skipped if skip.name in checked)
    return [
        f"{report.counts}.",
        *(f"not checked, {count}: {reason}" for reason, count in report.not_checked.most_common()),
        f"{len(report.checks)} checks: {', '.join(f'{count} {word}' for word, count in verdicts.items())}.",
        *(
            f"runs of checked operations skipped, {count}: {reason}"
            for reason, count in partly.most_common(3)
        ),
        *([f"column Golden: units on {report.benchmark}."] if report.benchmark else []),
    ]


def report_document(report: OracleReport) -> Document:
    """Return the page: the counts, and every check, the worst first."""
    table = Table(HEADINGS, [report.row(check).cells for check in report.checks], (1, 2, 3, 7))
    title = f"Operations against float64: {report.verdict}"
    return Document(
        title, [BulletList(summary(report)), Section("Checks", [table])], f"{report.device}; {report.source}"
    )


def results_json(report: OracleReport) -> dict[str, Any]:
    """Return what oracle.json holds. Numbers that are not finite are null."""
    counts = Counter(check.verdict for check in report.checks)
    rows = [
        {name: finite(value) for name, value in vars(check).items()}
        | {"verdict": check.verdict, "benchmark_units": finite(report.others.get(key(vars(check))))}
        for check in report.checks
    ]
    return {
        "schema": 2,
        "verdict": report.verdict,
        "device": report.device,
        "source": report.source,
        "benchmark": report.benchmark,
        "operations": {
            "recorded": len(report.recorded),
            "checked": len(report.recorded) - report.not_checked.total(),
            "not_checked": dict(report.not_checked),
        },
        "counts": {word: counts[word] for word in ("wrong", "rounding", "note")},
        "skipped": [vars(skip) for skip in report.skipped],
        "rows": rows,
    }
