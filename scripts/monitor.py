"""`make monitor RUN=results/x/runs/B0 [ON="grad:blocks.3"] [OFF=all]`: the monitor of one run.

Without ON and OFF it prints the tables and the triggers. ON and OFF take effect at the next step of a run that
trains with CONFIG_MONITOR=y.
"""

from __future__ import annotations

import re
from pathlib import Path

from referee.numerics.monitor.invariants import invariants
from referee.numerics.monitor.monitor_tables import read_tables
from referee.numerics.monitor.targets import change_control, read_control, read_triggers
from referee.numerics.rows import text_table
from runtime import run_record
from runtime.dotconfig import read_symbols, split_words
from runtime.errors import UserError, run_command
from runtime.settings import MonitorSettings
from scripts.record import run_arguments

USAGE = "make monitor RUN=results/STUDY/runs/NAME"


def main() -> int:
    arguments = run_arguments("monitor", USAGE, {"ON": "", "OFF": ""})
    run_dir: Path = arguments.run
    record, folder = run_record.load_given(run_dir), run_dir / "monitor"
    settings = MonitorSettings.from_symbols(read_symbols(run_dir / "config"))
    if not settings.enabled and not folder.is_dir():
        raise UserError(
            f"{record.run} trained without CONFIG_MONITOR=y, so it has no tables and reads no targets; fix: make "
            "defconfig-... CONFIG_MONITOR=y"
        )
    if arguments.on or arguments.off:
        if record.status == "finished":
            given = " ".join(f"{key}=" for key in ("ON", "OFF") if getattr(arguments, key.lower()))
            raise UserError(
                f"{record.run} is finished, so {given} changes nothing; fix: leave it out to print the tables"
            )
        change_control(folder, split_words(arguments.on), split_words(arguments.off))
    print(*describe(record, settings, folder), sep="\n")
    return 0


def describe(record: run_record.RunRecord, settings: MonitorSettings, folder: Path) -> list[str]:
    """Return the lines on the state, the tables of each rank, and the triggers."""
    step = record.progress.iterations if record.progress else 0
    extra = ", ".join(map(str, read_control(folder))) or "nothing"
    lines = [
        f"{record.run}: {record.status}, last saved at step {step}",
        f"every {settings.interval} steps: {' '.join(settings.targets)}; every step: {extra}",
    ]
    if record.status == "finished":
        lines.append("the run is finished: nothing more is monitored")
    lines += [note for note in record.notes if re.match("monitor: (?!step )", note)]  # a step's are below
    run = read_tables(folder)
    for (kind, rank), table in run.tables.items():
        names, steps = len(table.names), table.steps
        lines.append(
            f"rank {rank}: {kind}: {names} tensors, {len(steps)} steps from {steps[0]} to {steps[-1]}"
        )
    lines += text_table(invariants(run))
    for entry in read_triggers(folder):
        kept = entry.get("checkpoint")
        lines.append(
            f"step {entry['step']}: {entry['trigger']}: {entry.get('reason')}; "
            f"{f'checkpoint kept in {kept}' if kept else 'no checkpoint before it'}"
        )
        lines.append(f"    make record RUN={folder.parent} STEP={entry['step']}")
    return lines


if __name__ == "__main__":
    run_command(main)
