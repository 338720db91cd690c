"""The searches of a bisection, in the order of their cost, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpt2.system.errors import UserError
from numerics.search.smallest_set import Journal
from scripts.bisect.modules import search_modules, search_phases
from scripts.bisect.play import Player
from scripts.bisect.session import BisectSession, Result, default_folder, identity
from scripts.bisect.settings import search_settings
from scripts.bisect.steps import search_steps
from scripts.bisect.symptoms import NAN, OF_TWO, ROUNDING, ObservedSymptom, find_symptom
from scripts.bisect.write import write_bisection
from scripts.diagnose.runs import RunSide, read_with
from scripts.record.replay import RunReplay

SEARCHES = ("settings", "steps", "phases", "modules")
BIT_SEARCHES = ("settings", "steps")  # of a difference within rounding


def bisect_run(given: argparse.Namespace) -> int:
    run, against = read_with(given.run, given.against)
    symptom = find_symptom(run, against, given.step, given.symptom)
    folder = given.out or default_folder(given.run, "bisect")
    print(f"{run.label}: {symptom.text}", flush=True)
    session = start(run, symptom, folder, against, from_start=False)
    wanted = given.over or SEARCHES
    if symptom.kind == ROUNDING and not given.over:
        wanted = BIT_SEARCHES
    elif symptom.kind == ROUNDING and not {*wanted} <= {*BIT_SEARCHES}:
        raise UserError(
            f"OVER={' '.join(wanted)} explains no difference within rounding, since each fix rounds otherwise; fix: "
            f'OVER="{" ".join(BIT_SEARCHES)}"'
        )
    results: list[Result] = []
    if "settings" in wanted and against is not None:
        results += _settings(run, against, symptom, session)
    explained = any(result.found for result in results) and not given.over
    if "steps" in wanted and against is not None and not explained:
        results.append(_steps(run, against, session))
    if not explained and {"phases", "modules"} & {*wanted}:
        session, more = _parts(session, run, symptom, wanted, (folder, against))
        results += more
    counts = (session.journal.asked, session.journal.reused)
    written = write_bisection(folder, run.label, against.label if against else "", symptom, results, counts)
    for result in results:
        print(f"{result.name}: {result.text} ({result.replays} replays)")
    for result in results:
        if result.fix:
            print(
                f'next: CONFIG_NUMERICS_FIX="{result.fix}" trains with the fix; make record records the step'
            )
    print(f"journal: {counts[0]} replays computed, {counts[1]} earlier answers reused")
    print(*(f"wrote {path}" for path in written), sep="\n")
    return 0


def start(
    run: RunSide, symptom: ObservedSymptom, folder: Path, against: RunSide | None, *, from_start: bool
) -> BisectSession:
    """Load the run before its symptom, and open the journal."""
    assert run.record
    replay = RunReplay(run.path, run.record, symptom.step, from_start)
    print(*replay.skipped, sep="\n", end="\n" if replay.skipped else "")
    others: dict[str, Any] = {"against": None}
    if against and (other := against.record):
        others = {"against": [other.run, other.variant, other.seed, other.config_sha256]}
    journal = Journal(folder, identity(run.record, symptom, replay.start, others))
    session = BisectSession(
        run.path,
        run.record,
        symptom.from_start(run, replay.start),
        Player.of_replay(replay),
        journal,
    )
    origin = f"the checkpoint at {replay.start}" if replay.start else "the initial weights"
    print(f"replays: {symptom.step - replay.start} steps from {origin}", flush=True)
    return session


def _settings(
    run: RunSide, against: RunSide, symptom: ObservedSymptom, session: BisectSession
) -> list[Result]:
    assert run.record
    assert against.record
    records = (run.record, against.record)
    found = search_settings((run.path, against.path), records, symptom.from_start(run, 0), session.journal)
    return [found] if found else [Result("settings", "no setting of training differs")]


def _steps(run: RunSide, against: RunSide, session: BisectSession) -> Result:
    """Search from the nearest common checkpoint; where the states differ there already, from the initial weights."""
    last = session.symptom.step
    paths = run.path, against.path
    try:
        other = _player(against, last)
    except UserError as error:
        print(f"{against.label} is not replayed: {str(error).partition('; fix')[0]}")
        return search_steps(paths, (session.player, None), last)
    player = session.player
    if other.start == player.start:
        found = search_steps(paths, (player, other), last)
        if not player.start or found.found != (f"step {player.start}",):
            return found
        print(f"the checkpoints at {player.start} differ already: from the initial weights", flush=True)
    return search_steps(
        paths, (_player(run, last, from_start=True), _player(against, last, from_start=True)), last
    )


def _player(side: RunSide, last: int, from_start: bool = False) -> Player:
    assert side.record
    return Player.of_replay(RunReplay(side.path, side.record, last, from_start))


def _parts(
    session: BisectSession,
    run: RunSide,
    symptom: ObservedSymptom,
    wanted: tuple[str, ...],
    place: tuple[Path, RunSide | None],
) -> tuple[BisectSession, list[Result]]:
    """Search phases and modules: from the nearest checkpoint, then from the initial weights if that gives nothing."""
    if not session.shows():
        if session.player.start:
            print("the replay from the checkpoint does not show the symptom")
            session = start(run, symptom, *place, from_start=True)
        if not session.shows():
            if place[1] is None:
                raise UserError(_not_shown(run, symptom))
            return session, [Result("replay", _not_shown(run, symptom))]
    results = [search_phases(session)] if "phases" in wanted else []
    if "modules" not in wanted:
        return session, results
    device = session.player.run.device
    kinds = ("upcast", "small") if device == "cpu" else ("upcast", "small", "cpu")
    found = search_modules(session, kinds)
    if not found.found and session.player.start:
        print("no module explains it from the checkpoint, whose weights may show the fault already")
        session = start(run, symptom, *place, from_start=True)
        found = search_modules(session, kinds) if session.shows() else found
    return session, [*results, found]


def _not_shown(run: RunSide, symptom: ObservedSymptom) -> str:
    if symptom.kind in OF_TWO:
        of = "the machine or its libraries"
        if run.record and run.record.batch and run.record.batch.world_size > 1:
            of = f"the exchange between its {run.record.batch.world_size} ranks, the machine or its libraries"
        return (
            f"a replay of {run.label} here does not differ from the other run, so the difference is of {of}, or not "
            f"reproducible; fix: make repeat RUN={run.path} STEP={symptom.step}"
        )
    what = "is finite" if symptom.kind == NAN else "has no spike"
    return (
        f"a replay of {run.label} up to step {symptom.step} {what}, so the symptom is not reproducible here; fix: "
        f"make repeat RUN={run.path} STEP={symptom.step}"
    )
