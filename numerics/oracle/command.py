"""`python -m numerics oracle RECORD [--other RESULTS] -o OUT`: each operation of a step against float64 on the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from numerics.errors import NumericsError

if TYPE_CHECKING:
    from numerics.oracle.operation import Operation
    from numerics.oracle.report import OracleReport
    from numerics.oracle.results import Skipped

DESCRIPTION = """
Run every operation of a recorded step on this machine's device, forward and backward, and measure it against float64 on
the CPU: on the recorded values, or on generated ones of the same shapes, dtypes and ranges. Writes OUT/oracle.json and
OUT/oracle.html. The exit status is 0 for every verdict, also for "wrong"; it is 1 where a record cannot be used.
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add oracle to the commands of `python -m numerics`."""
    parser = commands.add_parser(
        "oracle", description=DESCRIPTION, help="check each operation of a recorded step"
    )
    parser.add_argument("record", type=Path, help="the record: dump, step or rank")
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
    from numerics.oracle.record import operations

    report = check_all(
        operations(given.record), f"record {given.record}", given.device, given.other, not given.no_extremes
    )
    show(report, given.output_path)
    return 0


def check_all(
    found: Iterable[Operation | Skipped],
    source: str,
    device: str = "",
    other: Path | None = None,
    extremes: bool = True,
) -> OracleReport:
    """Check operations on a device. other: results of the benchmark machine. NumericsError for an unusable device."""
    from numerics.oracle.check import Oracle, usable_device
    from numerics.oracle.parties import parties, read_results
    from numerics.oracle.report import OracleReport
    from numerics.oracle.results import Skipped

    benchmark = read_results(other) if other else None
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
    pairs, alone = parties(oracle.checks, benchmark) if benchmark else ([], 0)
    name = benchmark.device if benchmark else ""
    return OracleReport(
        device_name(chosen), source, oracle.checks, oracle.skipped, name, pairs, alone, list(names)
    )


def device_name(device: object) -> str:
    """Return the name of a device in words, with torch's version."""
    import torch

    assert isinstance(device, torch.device)
    module = getattr(torch, device.type, None)
    get_name = getattr(module, "get_device_name", None)
    name = f"{device.type} {get_name(device)}" if get_name and device.type != "cpu" else device.type
    return f"{name}, torch {torch.__version__}"


def show(report: OracleReport, folder: Path) -> None:
    """Print the report, and write its files."""
    from numerics.oracle.report import report_document, write_report
    from pages.document import render_terminal

    written = write_report(report, folder)
    print(render_terminal(report_document(report)), *(f"wrote {path}" for path in written), sep="\n")
