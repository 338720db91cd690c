"""`make bisect RUN=results/x/runs/B0 [AGAINST=results/y/runs/B0] [STEP=40]`: which modules of a run give a symptom?

The steps up to the symptom are replayed with fixed modules. The smallest set without the symptom is printed.
"""

from __future__ import annotations

import argparse
import functools
import math

from referee.errors import NumericsError
from referee.numerics.search.commands import SYMPTOMS, search
from runtime import run_record
from runtime.errors import UserError, run_command
from scripts.record import result_folder, run_arguments, show_differences
from study.compare.loaded_studies import RunSide, read_sides
from study.evaluation.loaded_runs import enter_environment, open_run

USAGE = "make bisect RUN=results/STUDY/runs/NAME [AGAINST=results/OTHER/runs/NAME]"
VARIABLES = {"AGAINST": "", "STEP": "", "SYMPTOM": "", "OUT": ""}  # and RUN


def main(restart: bool = False) -> int:
    """restart: whether to restart this process with the environment of the run."""
    given = parse_arguments()
    record = run_record.load_given(given.run)
    enter_environment(record, restart)
    run, *others = read_sides([given.run, *([given.against] if given.against else [])])
    against = others[0] if others else None
    symptom, step = find_symptom(run, against, given.symptom, given.step)
    print(f"{run.label}: {symptom} at step {step}", flush=True)
    out = given.out or result_folder(given.run, "bisect")
    compared = {"golden": against.curve, "epsilon": max(run.epsilon, against.epsilon)} if against else {}
    for from_start in (False, True):
        replay = open_run(given.run, record, step, from_start)
        before = [loss for number, loss in run.curve.losses.items() if number <= replay.start]
        steps = replay.steps(before, **compared)
        try:
            found = search(steps, symptom, out)
        except NumericsError as error:
            if not replay.start:
                raise
            found = ()
            print(f"{error}".partition("; fix")[0])
        if found or not replay.start:
            break
        print(f"the checkpoint at {replay.start} may be too late: from the initial weights")
    if found:
        print(
            f'next: CONFIG_NUMERICS_FIX="{" ".join(found)}" trains with the fix; make record records the step'
        )
    show_differences(replay)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Parse the variables of make. UserError names a wrong one."""
    found = run_arguments("bisect", USAGE, VARIABLES, choices={"SYMPTOM": SYMPTOMS})
    for name, path in (("RUN", found.run), ("AGAINST", found.against)):
        if path and not (path / "run.json").exists():
            raise UserError(f"{name}={path} is not a run folder; fix: {USAGE}")
    if found.step == 0:
        raise UserError(f"STEP=0 is not a step number; fix: {USAGE}")
    return found


def find_symptom(run: RunSide, against: RunSide | None, kind: str, step: int | None) -> tuple[str, int]:
    """Return the kind of a symptom and its first step, or `step`. UserError where the run shows none."""
    places: dict[str, list[int]] = {}
    if against is not None:
        from referee.numerics.diagnose.symptoms import pair_curves

        epsilon = max(run.epsilon, against.epsilon)
        differing = pair_curves(run.curve, against.curve, epsilon).beyond
        places["differs"] = (
            [step or differing.step] if differing and differing.step <= (step or math.inf) else []
        )
    places["nan"] = [number for number, loss in run.curve.losses.items() if not math.isfinite(loss)]
    places["spike"] = sorted(int(spike.iteration) for spike in (run.record.spikes if run.record else ()))
    if kind == "differs" and against is None:
        raise UserError(f"SYMPTOM=differs needs another run; fix: {USAGE}")
    for name in (kind,) if kind else tuple(places):
        if steps := [number for number in places[name] if step in (None, number)]:
            return name, steps[0]
    at = f" at step {step}" if step else ""
    raise UserError(
        f"{run.label} shows no {kind or 'symptom: every step is finite, without a spike'}{at}; fix: compare it with "
        f"another run: make bisect RUN={run.path} AGAINST=results/y/runs/B0"
    )


if __name__ == "__main__":
    run_command(functools.partial(main, restart=True))
