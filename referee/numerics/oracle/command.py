"""`python -m referee oracle RECORD [--other RESULTS] -o OUT`: each operation of a step against float64 on the CPU."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from referee.errors import NumericsError
from referee.numerics.rows import TableRow, text_table
from referee.numerics.text_files import finite, read_dump_json, write_json, writing

if TYPE_CHECKING:
    from referee.numerics.rounding.operation_checks import Check, Oracle

DESCRIPTION = """
Run every operation of a recorded step on this machine's device, forward and backward, and measure it against float64 on
the CPU: on the recorded values, or on generated ones of the same shapes, dtypes and ranges. Writes OUT/oracle.json. The
exit status is 0 for every verdict, also for "wrong"; it is 1 where a record cannot be used.
"""
RESULTS = "oracle.json"
MOST_ROWS, LARGEST_ROWS = 20, 5  # in the terminal: of wrong checks; of others where none is wrong
Units = Mapping[tuple[str, ...], float]  # of the checks of another machine, by `key`


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add oracle to the commands of `python -m referee`."""
    parser = commands.add_parser(
        "oracle", description=DESCRIPTION, help="check each operation of a recorded step"
    )
    parser.add_argument("record", type=Path, help="the record: dump, step or rank")
    parser.add_argument("--other", type=Path, help="oracle.json of the benchmark machine, or its folder")
    parser.add_argument("--device", help="by default the accelerator of this machine, else the CPU")
    parser.add_argument("-o", "--output_path", type=Path, default=Path("oracle"), help="folder of results")
    parser.set_defaults(run=run_oracle)


def run_oracle(given: argparse.Namespace) -> int:
    check_record(given.record, given.output_path, given.device, given.other)
    return 0


def check_record(record: Path, folder: Path, device: str | None = None, other: Path | None = None) -> Oracle:
    """Check the operations of a record (a dump, a step or a rank), print a table, and write oracle.json.

    device: by default the accelerator. other: the results of the benchmark machine. NumericsError where a record, a
    device or the results cannot be used.
    """
    import torch

    from referee.numerics.describe import device_name
    from referee.numerics.oracle.recorded_operations import operations
    from referee.numerics.rounding.operation_checks import Oracle, usable_device

    benchmark, others = read_results(other) if other else ("", {})
    oracle = Oracle(usable_device(device))
    for operation in operations(record):
        oracle.check(operation)
    if not oracle.checks:
        raise NumericsError(
            f"record {record}: no operation can be checked; fix: record with level mix or L1 (docs/oracle.md)"
        )
    oracle.checks.sort(key=lambda check: (not check.wrong, -check.units / (check.bound or 1.0)))
    kind, wrong = oracle.device.type, sum(check.wrong for check in oracle.checks)
    name = f"{kind if kind == 'cpu' else f'{kind} {device_name(kind)}'}, torch {torch.__version__}"
    with writing(folder, "give another folder by -o"):
        write_json(folder / RESULTS, results_json(oracle, name, benchmark, others))
    shown = [row_of(check, others) for check in oracle.checks[: min(wrong, MOST_ROWS) or LARGEST_ROWS]]
    print(
        f"Operations against float64: {'wrong' if wrong else 'rounding'}",
        f"{name}; record {record}",
        sep="\n",
    )
    print(*summary(oracle, benchmark), *text_table(shown), f"wrote {folder / RESULTS}", sep="\n")
    return oracle


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the same check of another machine shares; the digest is that of the inputs."""
    return tuple(str(row[name]) for name in ("name", "part", "dtype", "how", "digest"))


def row_of(check: Check, others: Units) -> TableRow:
    """Return a check as a row; in the column of the golden side are the units of the benchmark."""
    other = others.get(key(vars(check)))
    return TableRow(
        check.name, check.part, f"{check.how} {check.dtype}", check.why, "" if other is None else f"{other:.3g}",
        check.units, check.bound, check.verdict,
    )  # fmt: skip


def read_results(path: Path) -> tuple[str, Units]:
    """Return the device and the units of oracle.json of another machine. NumericsError where it cannot be used."""
    file = path / RESULTS if path.is_dir() else path
    fix = "run the check on the other machine and copy its oracle.json"
    content = read_dump_json(file, fix)
    try:
        rows = [row for row in content["rows"] if row["digest"]]
        return str(content["device"]), {
            key(row): float("inf" if row["units"] is None else row["units"]) for row in rows
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NumericsError(f"{file} holds no results of this check ({error}); fix: {fix}") from error


def summary(oracle: Oracle, benchmark: str) -> list[str]:
    """Return the counts: "15 operations: 13 checked, 2 not checked", reasons, verdicts."""
    left, count = oracle.not_checked, len(oracle.names)
    verdicts = Counter(check.verdict for check in oracle.checks)
    partly = sum(skip.name in {check.name for check in oracle.checks} for skip in oracle.skipped)
    return [
        f"{count} operations: {count - left.total()} checked, {left.total()} not checked",
        *(f"not checked, {number}: {reason}" for reason, number in left.most_common()),
        f"{len(oracle.checks)} checks: {', '.join(f'{number} {word}' for word, number in verdicts.items())}",
        *([f"{partly} runs of checked operations skipped: oracle.json has the reasons"] if partly else []),
        *([f"column Golden: units on {benchmark}"] if benchmark else []),
    ]


def results_json(oracle: Oracle, device: str, benchmark: str, others: Units) -> dict[str, Any]:
    """Return what oracle.json holds. Numbers that are not finite are null."""
    left, count = oracle.not_checked, len(oracle.names)
    counts = Counter(check.verdict for check in oracle.checks)
    return {
        "verdict": "wrong" if counts["wrong"] else "rounding",
        "device": device,
        "benchmark": benchmark,
        "operations": {"recorded": count, "checked": count - left.total(), "not_checked": dict(left)},
        "counts": {word: counts[word] for word in ("wrong", "rounding")},
        "skipped": [vars(skip) for skip in oracle.skipped],
        "rows": [
            {name: finite(value) for name, value in vars(check).items()}
            | {"verdict": check.verdict, "benchmark_units": finite(others.get(key(vars(check))))}
            for check in oracle.checks
        ],
    }
