"""`python -m referee fix` and `bisect` FILE.py:FUNCTION."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIX = """
Run the steps of FUNCTION without and with fixes, and print losses and what was replaced. FUNCTION returns (step,
state), or a referee.numerics.replayed_step.ReplayedStep.
"""
BISECT = """
Search for the smallest set of modules which, computed in a wider format or by small operations, makes a symptom vanish.
Writes OUT/bisect.json. The exit status is 1 where no set does.
"""
SYMPTOMS = ("nan", "spike", "differs")  # referee.numerics.search.bisect_replays, without torch


def add_commands(commands: Any) -> None:
    fixing = commands.add_parser("fix", description=FIX, help="replace computations of a step")
    fixing.add_argument("step", metavar="FILE.py:FUNCTION")
    fixing.add_argument("words", nargs="+", metavar="KIND:PATTERN", help="such as upcast:blocks.3.mlp")
    fixing.set_defaults(run=run_fix)
    parser = commands.add_parser("bisect", description=BISECT, help="which module gives a symptom?")
    parser.add_argument("step", metavar="FILE.py:FUNCTION")
    parser.add_argument("-s", "--symptom", choices=SYMPTOMS, default="nan")
    parser.add_argument("-o", "--output_path", type=Path, default=Path("bisect"), help="folder of results")
    parser.set_defaults(run=run_bisect)


def run_fix(given: Any) -> int:
    from referee.numerics.replayed_step import load_replay
    from referee.numerics.search.bisect_replays import apply_fixes, play

    replay, words = load_replay(given.step), " ".join(given.words)
    applied = apply_fixes(replay, words)
    try:
        replay.function()
        applied.require_used()
    finally:
        applied.undo()
    print(*applied.changes, sep="\n")
    for name, (curve, failed) in (("without", play(replay)), ("with", play(replay, words))):
        for number, loss in curve.losses.items():
            print(f"step {number}: loss {loss!r} {name} the fix")
        if failed:
            print(f"step {failed} is not finite {name} the fix")
    return 0


def run_bisect(given: Any) -> int:
    from referee.numerics.replayed_step import load_replay

    return int(not search(load_replay(given.step), given.symptom, given.output_path))


def search(replay: Any, symptom: str, folder: Path) -> tuple[str, ...]:
    """Search, print each replay and the answer, and write bisect.json."""
    from referee.numerics.search.bisect_replays import Bisection
    from referee.numerics.text_files import create_folder, write_json

    kinds = ["upcast", "small", *(["cpu"] if replay.device != "cpu" else [])]
    create_folder(folder)

    def progress(words: str, outcome: str) -> None:
        name = words if len(words) <= 90 else f"{words[:90].rpartition(' ')[0]} ... ({len(words.split())})"
        print(f"  replay {len(bisection.tried) + 1}: {name or 'as it is'}: {outcome}", flush=True)

    print(f"replays of {replay.steps} steps after step {replay.start}; symptom {symptom}", flush=True)
    bisection = Bisection(replay, symptom, kinds, progress)
    found = bisection.search()
    answer = f"the symptom is gone with {' '.join(found)}" if found else "the symptom vanishes with no fix"
    print(f"{answer}\n{len(bisection.tried)} replays")
    content = {"symptom": symptom, "found": found, "tried": bisection.tried}
    write_json(folder / "bisect.json", content | {"start": replay.start, "steps": replay.steps})
    print(f"wrote {folder / 'bisect.json'}")
    return found
