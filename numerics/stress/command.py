"""`python -m numerics stress --minutes 10`: find a faulty device by results that must be equal to the bit."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from numerics.dump_files import writing
from numerics.errors import NumericsError

if TYPE_CHECKING:
    from numerics.stress.run import Progress, StressOutcome

DESCRIPTION = """
Repeat golden computations on each device alone and on all together: matrices, attention, copies, a training step,
memory patterns, and exchanges among the devices. A result that is not equal to the bit is a fault; its device or link,
first occurrence and bits are reported.
Golden results are elected by majority. With -o on a folder that machines share, their golden results are compared as
well. Ctrl-C ends the stress with the report so far. The exit status is 1 where a device deviates.
"""
MOST_MINUTES = 7 * 24 * 60
PLAIN_SECONDS = 15.0  # between lines of progress


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("stress", description=DESCRIPTION, help="find a faulty device")
    parser.add_argument("-m", "--minutes", type=float, default=10.0)
    parser.add_argument("-o", "--output_path", type=Path, default=Path("stress"), help="folder of results")
    parser.add_argument("-d", "--devices", nargs="+", help="torch's names, such as cpu cpu; default: all")
    parser.add_argument("--memory", type=int, metavar="MiB", help="of the memory patterns on a device")
    parser.add_argument(
        "--simulate",
        metavar="DEVICE:RATE:BIT",
        help="flip a bit in a share of the results of one device: a drill",
    )
    parser.set_defaults(run=run_stress)


def run_stress(given: argparse.Namespace) -> int:
    shown = time.monotonic()

    def progress(share: float, text: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PLAIN_SECONDS:
            shown = time.monotonic()
            print(f"{share:4.0%}  {text}", flush=True)

    return stress_devices(
        given.minutes, given.output_path, given.devices, given.memory, given.simulate, progress=progress
    )


def stress_devices(
    minutes: float,
    folder: Path,
    devices: list[str] | None = None,
    memory_mib: int | None = None,
    simulate: str | None = None,
    processes: int = 1,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    ended: Callable[[], None] = lambda: None,
) -> int:
    """Stress devices, print the report and write it. Returns the exit status.

    processes: on a machine without accelerators. say: prints a line. ended: called before the report is printed.
    NumericsError where a setting or a device cannot be used.
    """
    say = say or (lambda text: print(text, flush=True))
    if not 0 < minutes <= MOST_MINUTES:
        raise NumericsError(f"{minutes:g} minutes cannot be used; fix: more than 0, at most {MOST_MINUTES}")
    if memory_mib is not None and memory_mib < 1:
        raise NumericsError(f"{memory_mib} MiB cannot be used; fix: at least 1")
    from numerics.stress.devices import default_devices, kernel_names, label, parse_fault, workers
    from numerics.stress.links import LinkStress
    from numerics.stress.report import compare_machines, stress_document, write_stress
    from numerics.stress.run import Stress
    from pages.document import render_terminal

    with writing(folder, "give another folder for the results"):  # known before the stress
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    chosen = devices or default_devices(processes)
    memory = None if memory_mib is None else memory_mib << 20
    faults = dict([parse_fault(simulate, len(chosen))]) if simulate else {}
    with interrupts() as asked, workers(chosen, memory, faults) as started:
        say(
            f"stress of {', '.join(worker.name for worker in started)}; Ctrl-C ends it with the report so far"
        )
        links = LinkStress(started, chosen) if len(started) > 1 else None
        if links:
            links.connect()
        stress = Stress(started, kernel_names(chosen, memory), 60 * minutes, progress, asked, links=links)
        stress.elect()
        say(f"golden results of {sum(map(len, stress.outcome.golden.values()))} kernels")
        found: StressOutcome = stress.run()
    ended()
    if simulate:
        found.notes.append(f"a fault was simulated: {simulate}")
    print(render_terminal(stress_document(found)))
    written = write_stress(found, folder, label())
    sentences, odd = compare_machines(folder)
    if sentences:
        print("", "Other machines", *(f"- {text}" for text in sentences), sep="\n")
    print(*(f"wrote {path}" for path in written), sep="\n")
    return int(bool(found.faulty or odd or (found.links and found.links.faults)))


class interrupts:  # noqa: N801 (a context manager)
    """In the block, SIGINT and SIGTERM set a flag; a second one ends the program. Enter: whether one was received."""

    def __enter__(self) -> Callable[[], bool]:
        self._asked = False
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return lambda: self._asked

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
