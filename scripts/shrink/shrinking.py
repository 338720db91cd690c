"""Reduce the sizes of a run while its symptom persists, and write the smallest configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configuration import rules
from configuration.files import load_leniently
from gpt2.artifacts.run_record import RunRecord
from gpt2.config.config import CUSTOM_MODEL, MODELS, Config
from gpt2.config.dotconfig import Entry, Symbols, read_symbols
from gpt2.hardware.gpu_specs import TargetError
from gpt2.system import files
from gpt2.system.errors import UserError
from numerics.bisect.journal import Journal
from numerics.bisect.search import smallest_sizes
from pages.markup import counted
from scripts.bisect.play import Played, RunSettings
from scripts.bisect.session import default_folder, identity
from scripts.bisect.settings import SCRATCH
from scripts.bisect.symptoms import OF_TWO, ObservedSymptom, find_symptom
from scripts.diagnose.runs import read_with

LEAST_HEAD, LEAST_BLOCK = 8, 16  # channels of a head, for which kernels exist; Kconfig's least sequence
NAMES = {  # of a size -> its symbol, or its meaning
    "layers": "GPT2_LAYERS",
    "heads": "GPT2_HEADS",
    "head_size": "width / heads",
    "block_size": "GPT2_BLOCK_SIZE",
    "batch": "EFFECTIVE_BATCH",
}


def shrink_run(given: argparse.Namespace) -> int:
    """given: run, against, step, symptom and out of the command."""
    run, against = read_with(given.run, given.against)
    symptom = find_symptom(run, against, given.step, given.symptom).from_start(run, 0)
    folder = given.out or default_folder(given.run, "shrink")
    sides = [run, *([against] if against and symptom.kind in OF_TWO else [])]
    records = [side.record for side in sides if side.record]
    settings = [
        RunSettings.of_run(side.path, record, read_symbols(side.path / "config").entries)
        for side, record in zip(sides, records, strict=True)
    ]
    start = sizes_of(settings[0])
    print(f"{run.label}: {symptom.text}")
    of = " of both runs" if len(sides) > 1 else ""
    print(
        f"trials: up to {symptom.step} steps{of} from the initial weights; at first {_text(start)}",
        flush=True,
    )
    others = [[other.run, other.variant, other.seed, other.config_sha256] for other in records[1:]]
    journal = Journal(
        folder / "journal.jsonl", identity(records[0], symptom, 0, {"sizes": start, "against": others})
    )

    def shows(sizes: Mapping[str, int]) -> bool:
        def compute() -> object:
            return _trial(settings, sizes, start, symptom, journal.asked + 1)

        answer = journal.ask(json.dumps(sorted(sizes.items())), compute)
        return answer is not None and present(symptom, [Played.from_json(played) for played in answer])

    if not shows(start):
        raise UserError(_not_shown(given.run, records, symptom))
    found = smallest_sizes(start, choices(start), shows)
    print(f"smallest: {_text(found)}; at first {_text(start)}")
    print(f"journal: {journal.asked} trials computed, {journal.reused} earlier answers reused")
    written: list[str] = []
    for number, (side, record) in enumerate(zip(settings, records, strict=True)):
        ending = "-against" if number else ""
        study = f"shrink-{records[0].run}"[: 64 - len(ending)] + ending
        path = folder / f"defconfig{ending}"
        files.write_text(path, defconfig(side, found, records[0].run, study))
        print(f"wrote {path}")
        print(f"next: cp {path} .config && make olddefconfig && make")
        written.append(f"results/{study}/runs/{record.run}")
    if len(written) > 1:
        print(f"then: make bisect RUN={written[0]} AGAINST={written[1]}")
    return 0


def present(symptom: ObservedSymptom, played: Sequence[Played]) -> bool:
    """Whether a trial shows the symptom. played: of the run and, where it is a difference, of the other one."""
    if len(played) > 1:
        symptom = replace(symptom, other=played[1].curve("against"))
    return symptom.present(played[0])


def _not_shown(run_dir: Path, records: Sequence[RunRecord], symptom: ObservedSymptom) -> str:
    batch = records[0].batch
    exchange = symptom.kind in OF_TWO and batch and batch.world_size > 1
    reason = f"the exchange between its {batch.world_size} ranks, or " if exchange and batch else ""
    return (
        f"a trial of {records[0].run} up to step {symptom.step} does not show the symptom, so it is {reason}not "
        f"reproducible here; fix: make repeat RUN={run_dir} STEP={symptom.step}"
    )


def sizes_of(settings: RunSettings) -> dict[str, int]:
    """Return the sizes of a run; the number of ranks where there are several."""
    config = Config.from_symbols(Symbols("settings", settings.entries))
    model = config.model
    found = {"ranks": settings.ranks} if settings.ranks > 1 else {}
    return found | {
        "layers": model.layers,
        "heads": model.heads,
        "head_size": model.width // model.heads,
        "block_size": model.block_size,
        "batch": config.batch.effective,
    }


def choices(start: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the values of each size, ascending, up to that of the run."""
    powers = [2**exponent for exponent in range(31)]

    def up_to(name: str, least: int) -> list[int]:
        return [value for value in powers if least <= value < start[name]] + [start[name]]

    ranks = {"ranks": list(range(1, start["ranks"] + 1))} if "ranks" in start else {}
    return ranks | {
        "layers": list(range(1, start["layers"] + 1)),
        "batch": up_to("batch", 1),
        "block_size": up_to("block_size", LEAST_BLOCK),
        "heads": list(range(1, start["heads"] + 1)),
        "head_size": up_to("head_size", LEAST_HEAD),
    }


def _text(sizes: Mapping[str, int]) -> str:
    width = sizes["heads"] * sizes["head_size"]
    layers, heads = counted(sizes["layers"], "layer"), counted(sizes["heads"], "head")
    ranks = f", {sizes['ranks']} ranks" if sizes.get("ranks", 1) > 1 else ""
    return f"{layers}, {heads}, width {width}, {sizes['block_size']} tokens, batch {sizes['batch']}{ranks}"


def sized(settings: RunSettings, sizes: Mapping[str, int]) -> RunSettings:
    """Return the settings of a run with other sizes."""

    def number(name: str, value: int) -> Entry:
        return Entry(name, str(value), False, "shrink")

    entries = {name: entry for name, entry in settings.entries.items() if name not in MODELS}
    changed = {
        CUSTOM_MODEL: Entry(CUSTOM_MODEL, "y", False, "shrink"),
        "GPT2_LAYERS": number("GPT2_LAYERS", sizes["layers"]),
        "GPT2_HEADS": number("GPT2_HEADS", sizes["heads"]),
        "GPT2_WIDTH": number("GPT2_WIDTH", sizes["heads"] * sizes["head_size"]),
        "GPT2_BLOCK_SIZE": number("GPT2_BLOCK_SIZE", sizes["block_size"]),
        "EFFECTIVE_BATCH": number("EFFECTIVE_BATCH", sizes["batch"]),
        "MICRO_BATCH": number("MICRO_BATCH", 0),
    }
    ranks = sizes.get("ranks", settings.ranks)
    if ranks != settings.ranks:
        changed["RANKS"] = number("RANKS", ranks)
    return replace(settings, entries=entries | changed, ranks=ranks)


def _trial(
    settings: Sequence[RunSettings],
    sizes: Mapping[str, int],
    start: Mapping[str, int],
    symptom: ObservedSymptom,
    number: int,
) -> object:
    """Train with other sizes. Returns the played steps of each run as plain data; None where the sizes make no run."""
    try:
        played = [
            (side if sizes == start else sized(side, sizes)).player(SCRATCH).play(symptom.step)
            for side in settings
        ]
    except TargetError:
        raise
    except (UserError, ValueError) as error:
        print(f"  trial {number}: {_text(sizes)}: no run: {error}", flush=True)
        return None
    state = "symptom" if present(symptom, played) else "no symptom"
    print(f"  trial {number}: {_text(sizes)}: {state}", flush=True)
    return [each.to_json() for each in played]


def defconfig(settings: RunSettings, sizes: Mapping[str, int], run: str, study: str) -> str:
    """Return the shortest defconfig of a study of the run alone, with other sizes. study: its name."""
    shrunken = sized(settings, sizes)
    entries = dict(shrunken.entries)

    def text(name: str, value: str) -> Entry:
        return Entry(name, value, True, "shrink")

    def number(name: str, value: int) -> Entry:
        return Entry(name, str(value), False, "shrink")

    entries |= {
        "STUDY_NAME": text("STUDY_NAME", study),
        "MICRO_BATCH": number("MICRO_BATCH", shrunken.micro_batch(sizes["batch"])),
        "VARIANTS": text("VARIANTS", settings.variant),
        "SEEDS": number("SEEDS", settings.seed + 1),
        "GPT2_MAX_ITERS": number("GPT2_MAX_ITERS", settings.iterations),
        "GPT2_MAX_TIME": number("GPT2_MAX_TIME", 0),
        "GPT2_MAX_TOKENS": number("GPT2_MAX_TOKENS", 0),
        "HELLASWAG": Entry("HELLASWAG", "n", False, "shrink"),
    }
    for name in ("LEARNING_RATES", "PRIMARY"):
        entries.pop(name, None)
    lines = "".join(f"{entry}\n" for entry in entries.values())
    loaded = load_leniently(lines, "the smallest configuration", entries["DETECTED"].value)
    header = f"# {run} at the smallest sizes that show its symptom ({_text(sizes)})\n"
    return rules.render(loaded.tree, minimal=True, header=header)
