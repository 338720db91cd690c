"""`python -m referee stress --minutes 10`: find a faulty device by results that must be equal to the bit."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

from referee.errors import NumericsError
from referee.numerics.rows import text_table
from referee.numerics.text_files import create_folder, read_dump_json, write_json

DESCRIPTION = """
Repeat matrix products, attention, copies and all-reduces on all devices. A result that is not golden, the majority's,
is a deviation. Each machine writes its golden results into the output folder and compares them with those of other
machines there. Ctrl-C ends the stress. The exit status is 1 where a device deviates.
"""
MOST_MINUTES = 7 * 24 * 60


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("stress", description=DESCRIPTION, help="find a faulty device")
    parser.add_argument("-m", "--minutes", type=float, default=10.0)
    parser.add_argument("-o", "--output_path", type=Path, default=Path("stress"), help="folder of results")
    parser.add_argument("-d", "--devices", nargs="+", help="torch's names, such as cpu cpu; default: all")
    parser.add_argument(
        "--simulate", metavar="DEVICE:RATE:BIT", help="flip a bit in a share of results: a drill"
    )
    parser.set_defaults(
        run=lambda given: stress_devices(given.minutes, given.output_path, given.devices, given.simulate)
    )


def stress_devices(
    minutes: float, folder: Path, devices: list[str] | None = None, simulate: str | None = None
) -> int:
    """Stress devices, write the golden results, print the table. Returns the exit status.

    NumericsError where a setting or a device cannot be used.
    """
    from referee.numerics.runs.stress_devices import default_devices, odd_machines, parse_fault, stress

    if not 0 < minutes <= MOST_MINUTES:
        raise NumericsError(f"{minutes:g} minutes cannot be used; fix: more than 0, at most {MOST_MINUTES}")
    chosen = devices or default_devices()
    fault = parse_fault(simulate, len(chosen)) if simulate else None
    create_folder(folder)
    print(f"{minutes:g} minutes on {', '.join(chosen)}; Ctrl-C ends it with the table so far", flush=True)
    outcome = stress(chosen, minutes, fault)
    label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{socket.gethostname()}-{os.environ.get('RANK', 0)}")
    write_json(folder / f"stress-{label}.json", {"kind": outcome.kind, "golden": outcome.golden})
    print(f"{outcome.kind}: {outcome.results.total():,} results")
    print(*text_table(outcome.rows()), sep="\n")
    if outcome.faulty:
        print(f"{len(outcome.faulty)} of {len(chosen)} devices deviate: {', '.join(outcome.faulty)}")
    else:
        print("no device deviates; a fault that is rarer or needs other computations is not excluded")
    fix = "remove the file: the next stress writes it"
    odd = odd_machines(
        {path.stem: read_dump_json(path, fix) for path in sorted(folder.glob("stress-*.json"))}
    )
    print(*(f"{name}: its golden results are not those of most machines" for name in odd), sep="\n", end="")
    return int(bool(outcome.faulty or odd))
