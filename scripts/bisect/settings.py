"""Search over the settings in which two runs differ: which of them together give the symptom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpt2.artifacts.run_record import RunRecord
from gpt2.config.dotconfig import Entry, read_symbols
from gpt2.hardware.gpu_specs import TargetError
from gpt2.system.errors import UserError
from numerics.search.smallest_set import Journal, smallest_set
from scripts.bisect.play import Played, RunSettings
from scripts.bisect.session import Result
from scripts.bisect.symptoms import ObservedSymptom
from study.compare.checklist_rows import ASIDE, GRPO, LIMITS, PLACES, WITHOUT_EFFECT
from study.compare.load import CHOICES

# symbols that change no training step here: names, places, limits (the planned iterations are an item of their own)
OTHERS = (
    "STUDY_NAME", "SEEDS", "VARIANTS", "PRIMARY", "RESULTS_DIR", "DATA_DIR", "DETECTED", "SCALE_CPU",
    "TARGET_DETECTED_CPU", "EVAL_TOKENS", "EQUIVALENCE_MARGIN_PERCENT", "GPT2_HARD_LIMIT", "CONTINUES",
    "BUDGET_EQUAL_TIME", "RANKS", "RANKS_TIMEOUT", *LIMITS, *GRPO,
)  # fmt: skip
GROUPS = (*CHOICES, "SCHEDULE_", "DATASET_")
DECIDED = ("variant", "seed", "iterations", "micro", "dtype", "warmup", "ranks")  # fields of Settings
SCRATCH = Path("bisect-scratch")  # no run writes to it


def groups(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """Return name -> its symbols; the members of a choice change together."""
    found: dict[str, dict[str, Entry]] = {}
    for name, entry in entries.items():
        if name in OTHERS or WITHOUT_EFFECT.get(name) in (ASIDE, PLACES):
            continue
        prefix = next((prefix for prefix in GROUPS if name.startswith(prefix)), name)
        if entry.value != "n":
            found.setdefault(prefix.rstrip("_"), {})[name] = entry
    return found


def differing(mine: RunSettings, theirs: RunSettings) -> list[str]:
    """Return the items in which two runs differ: groups of symbols, and what the study decided."""
    one, other = (
        {name: {key: entry.value for key, entry in members.items()} for name, members in groups(side.entries).items()}
        for side in (mine, theirs)
    )  # fmt: skip
    found = [f"CONFIG_{name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    decided = [name for name in DECIDED if getattr(mine, name) != getattr(theirs, name)]
    if "CONFIG_EFFECTIVE_BATCH" in found or "CONFIG_MICRO_BATCH" in found:
        decided = [name for name in decided if name != "micro"]
    if "CONFIG_DTYPE" in found:
        decided = [name for name in decided if name != "dtype"]
    return [*found, *decided]


def mixed(mine: RunSettings, theirs: RunSettings, items: tuple[str, ...]) -> RunSettings:
    """Return the settings of `theirs` with those of `mine` for the items."""
    entries = dict(theirs.entries)
    before, after = groups(theirs.entries), groups(mine.entries)
    for item in items:
        name = item.removeprefix("CONFIG_")
        for symbol in before.get(name, {}):
            entries.pop(symbol, None)
        entries |= after.get(name, {})
    changes = {name: getattr(mine, name) for name in DECIDED if name in items}
    if {"CONFIG_EFFECTIVE_BATCH", "CONFIG_MICRO_BATCH"} & {*items}:
        changes["micro"] = mine.micro
    if "CONFIG_DTYPE" in items:
        changes["dtype"] = mine.dtype
    return replace(theirs, entries=entries, **changes)


def shown(settings: RunSettings, side: RunSettings, item: str) -> str:
    """Return the value of an item on one side."""
    name = item.removeprefix("CONFIG_")
    if name in DECIDED and name == item:
        return f"{getattr(side, item)}"
    members = groups(side.entries).get(name, {})
    values = [
        entry.value if symbol == name else symbol.removeprefix(f"{name}_").lower()
        for symbol, entry in members.items()
    ]
    return " ".join(values) or "n"


def search_settings(
    runs: tuple[Path, Path], records: tuple[RunRecord, RunRecord], symptom: ObservedSymptom, journal: Journal
) -> Result | None:
    """Find the smallest set of the first run's settings that gives the second run the symptom; None if none differ."""
    mine, theirs = (
        RunSettings.of_run(run, record, read_symbols(run / "config").entries)
        for run, record in zip(runs, records, strict=True)
    )
    items = differing(mine, theirs)
    if not items:
        return None
    before = journal.asked

    def play(chosen: tuple[str, ...]) -> Played | None:
        question = json.dumps(["settings", symptom.step, *chosen])

        def compute() -> object:
            try:
                found = mixed(mine, theirs, chosen).player(SCRATCH).play(symptom.step)
            except TargetError:
                raise
            except (UserError, ValueError) as error:
                print(f"  replay {journal.asked + 1}: {' '.join(chosen)}: no run: {error}", flush=True)
                return None
            state = "symptom" if symptom.present(found) else "no symptom"
            print(
                f"  replay {journal.asked + 1}: {' '.join(chosen) or 'settings of AGAINST'}: {state}",
                flush=True,
            )
            return found.to_json()

        answer = journal.ask(question, compute)
        return Played.from_json(answer) if answer else None

    def shows(chosen: tuple[str, ...]) -> bool:
        played = play(chosen)
        return played is not None and symptom.present(played)

    found = smallest_set(items, shows)
    rows = tuple((item, f"{shown(theirs, theirs, item)} -> {shown(mine, mine, item)}") for item in items)
    replays = journal.asked - before
    if found is None:
        text = f"the {len(items)} settings that differ do not give the symptom in a replay from the start"
        return Result("settings", text, (), rows, replays=replays)
    if not found:
        text = "the other run's settings show the symptom in a replay here, too: not the settings"
        return Result("settings", text, (), rows, replays=replays)
    together = " together" if len(found) > 1 else ""
    texts = [f"{item}={shown(mine, mine, item)} ({shown(theirs, theirs, item)})" for item in found]
    text = f"{', '.join(texts)}{together} give{'s' if len(found) == 1 else ''} the symptom; of {len(items)} that differ"
    return Result("settings", text, found, rows, replays=replays)
