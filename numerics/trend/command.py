"""`python -m numerics trend A [B]`: trends of the monitor files of one run, or of a run against a reference."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numerics.dump_files import write_json, writing
from numerics.errors import NumericsError
from numerics.trend.conclusion import Record, Trend, Watch, analyse, as_json, next_commands, sentences
from numerics.trend.page import trend_page
from numerics.trend.tables import Monitored, read_monitor
from pages.document import Block, BulletList, Document, Paragraph, Table, render_terminal

DESCRIPTION = """
Show monitored tensors over steps, find the first anomaly, and name the tensors and ranks behind it (sections 4.6 and
4.7 of the guide). With two runs the first is the reference. Writes trend.html and trend.json. Files are those of the
monitor or of msProbe: rank<r>/<kind>_<first>-<last>.csv. The exit status is 0 for every result, and 1 where files
cannot be used.
"""
LISTED = 8  # tensors in the terminal


def add_command(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "trend", description=DESCRIPTION, help="trends of monitored tensors over steps"
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="folder of a run, of ranks, or of one rank; the reference first"
    )
    parser.add_argument("-o", "--output_path", type=Path, default=Path("trend"), help="folder of results")
    parser.add_argument("--losses", nargs="+", type=Path, default=[], help="a file of losses for each run")
    parser.add_argument(
        "--kinds", nargs="+", default=[], help="those to read, such as grad_reduced; by default all"
    )
    parser.add_argument(
        "--statistics", nargs="+", default=[], help="those to read, such as norm; by default all"
    )
    parser.set_defaults(run=run_trend)


def run_trend(given: argparse.Namespace) -> int:
    if len(given.losses) not in (0, len(given.runs)):
        raise NumericsError(
            f"{len(given.losses)} files of losses for {len(given.runs)} runs; fix: give one for each run"
        )
    losses = given.losses or [None] * len(given.runs)
    parts = [path.resolve().name for path in given.runs]
    names = parts if len({*parts}) == len(parts) else [str(path) for path in given.runs]
    runs = read_runs(given.runs, names, losses, given.kinds, given.statistics)
    print(*show(runs, given.output_path, record_command, watch_command), sep="\n")
    return 0


def read_runs(
    paths: Sequence[Path],
    names: Sequence[str],
    losses: Sequence[Path | None],
    kinds: Sequence[str] = (),
    statistics: Sequence[str] = (),
) -> list[Monitored]:
    """Read one or two runs; the last one is judged. NumericsError names what cannot be used."""
    if len(paths) > 2:
        raise NumericsError(f"{len(paths)} runs are given; fix: name one run, or a reference and a run")
    if len(paths) == 2 and os.path.realpath(paths[0]) == os.path.realpath(paths[1]):
        raise NumericsError(f"{paths[0]} is named twice; fix: name two different runs")
    return [
        read_monitor(path, name, file, kinds, statistics)
        for path, name, file in zip(paths, names, losses, strict=True)
    ]


def show(runs: Sequence[Monitored], folder: Path, record: Record, watch: Watch) -> list[str]:
    """Analyse one or two runs and write the results. Returns the lines for the terminal."""
    trend = analyse(runs[-1], runs[0] if len(runs) > 1 else None)
    commands = next_commands(trend, record, watch)
    written, notes = write_trend(trend, commands, folder)
    return terminal_lines(trend, commands, written, notes)


def trend_files(folder: Path) -> list[Path]:
    return [folder / "trend.json", folder / "trend.html"]


def write_trend(trend: Trend, commands: Sequence[str], folder: Path) -> tuple[list[Path], list[str]]:
    """Write trend.json and trend.html into the folder. Returns their paths, and notes."""
    paths = trend_files(folder)
    with writing(folder, "give another folder for the results"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(paths[0], as_json(trend, list(commands)))
        page, notes = trend_page(trend, commands)
        paths[1].write_text(page, encoding="utf-8")
    return paths, notes


def terminal_lines(
    trend: Trend, commands: Sequence[str], written: Sequence[Path], notes: Sequence[str]
) -> list[str]:
    """Return the conclusion, the tensors with the largest shares, the files and the next commands."""
    found = trend.attribution
    rows = [
        [
            one.name,
            f"{100 * one.share:.3g} %",
            f"{one.ratio:.3g}",
            "" if one.correlation is None else f"{one.correlation:.2f}",
        ]
        for one in found.carriers[:LISTED]
        if one.share
    ]
    heading = f"Tensor ({found.kind})" if rows else ""
    blocks: list[Block] = [
        *(Paragraph(f"{one}.") for one in sentences(trend)),
        Table([heading, "Share", "Norm / expected", "Correlation"], rows, ()),
        BulletList(list(notes)),
    ]
    title = "Trends of " + " against ".join(one.name for one in (trend.run, trend.reference) if one)
    next_lines = [f"next: {one}" for one in commands] or ["next: nothing"]
    return [render_terminal(Document(title, blocks)), "", *(f"wrote {path}" for path in written), *next_lines]


def record_command(run: Monitored, step: int) -> str:
    """Return how a script records a step."""
    return (
        f'record step {step} of {run.name} with PrecisionDebugger(task="statistics", level="mix"), step [{step}] in '
        "config.json"
    )


def watch_command(run: Monitored, kinds: Sequence[str]) -> str:
    """Return how a script monitors kinds."""
    switches = {"actv": "xy_distribution", "param": "param_distribution"}
    settings = ", ".join(f'"{switches[kind]}": true' for kind in kinds)
    return f"monitor {' and '.join(kinds)} of {run.name} with {settings} in config.json of TrainerMon"
