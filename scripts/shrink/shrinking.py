"""Reduce the sizes of a run while its symptom persists, and write the smallest configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpt2.artifacts import run_record
from gpt2.config.config import CUSTOM_MODEL, MODELS, Config
from gpt2.config.dotconfig import Entry, Symbols, read_symbols
from gpt2.hardware.gpu_specs import TargetError
from gpt2.system import files
from gpt2.system.errors import UserError
from kconfig import rules
from kconfig.files import load_leniently
from numerics.bisect.journal import Journal
from numerics.bisect.search import smallest_sizes
from scripts.bisect.play import Played, Settings
from scripts.bisect.session import default_folder, identity
from scripts.bisect.settings import SCRATCH
from scripts.bisect.symptoms import Symptom, find_symptom
from scripts.diagnose.runs import read_run

LEAST_HEAD, LEAST_BLOCK = 8, 16  # channels of a head, for which kernels exist; Kconfig's least sequence
NAMES = {  # of a size -> its symbol, or its meaning
    "layers": "GPT2_LAYERS",
    "heads": "GPT2_HEADS",
    "head_size": "width / heads",
    "block_size": "GPT2_BLOCK_SIZE",
    "batch": "EFFECTIVE_BATCH",
}


def shrink_run(run_dir: Path, step: int | None, kind: str, out: Path | None) -> int:
    record = run_record.load(run_dir)
    run = read_run(run_dir, run_dir.name)
    symptom = find_symptom(run, None, step, kind).from_start(run, 0)
    folder = out or default_folder(run_dir, "shrink")
    settings = Settings.of_run(run_dir, record, read_symbols(run_dir / "config").entries)
    config = Config.from_symbols(Symbols("settings", settings.entries))
    model = config.model
    start = {
        "layers": model.layers,
        "heads": model.heads,
        "head_size": model.width // model.heads,
        "block_size": model.block_size,
        "batch": config.batch.effective,
    }
    print(f"{record.run}: {symptom.text}")
    print(f"trials: up to {symptom.step} steps from the initial weights; at first {_text(start)}", flush=True)
    journal = Journal(folder / "journal.jsonl", identity(record, symptom, 0, {"sizes": start}))

    def shows(sizes: Mapping[str, int]) -> bool:
        def compute() -> object:
            return _trial(settings, sizes, start, symptom, journal.asked + 1)

        answer = journal.ask(json.dumps(sorted(sizes.items())), compute)
        return answer is not None and symptom.present(Played.from_json(answer))

    if not shows(start):
        raise UserError(
            f"a trial of {record.run} up to step {symptom.step} does not show the symptom, so it is not reproducible "
            f"here; fix: make repeat RUN={run_dir} STEP={symptom.step}"
        )
    found = smallest_sizes(start, choices(start), shows)
    path = folder / "defconfig"
    files.write_text(path, defconfig(settings, found, record.run))
    print(f"smallest: {_text(found)}; at first {_text(start)}")
    print(f"journal: {journal.asked} trials computed, {journal.reused} answers of it used again")
    print(f"wrote {path}")
    print(f"next: cp {path} .config && make olddefconfig && make")
    return 0


def choices(start: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the values of each size, ascending, up to that of the run."""
    powers = [2**exponent for exponent in range(31)]

    def up_to(name: str, least: int) -> list[int]:
        return [value for value in powers if least <= value < start[name]] + [start[name]]

    return {
        "layers": list(range(1, start["layers"] + 1)),
        "batch": up_to("batch", 1),
        "block_size": up_to("block_size", LEAST_BLOCK),
        "heads": list(range(1, start["heads"] + 1)),
        "head_size": up_to("head_size", LEAST_HEAD),
    }


def _text(sizes: Mapping[str, int]) -> str:
    width = sizes["heads"] * sizes["head_size"]
    return (
        f"{sizes['layers']} layers, {sizes['heads']} heads, width {width}, {sizes['block_size']} tokens, "
        f"batch {sizes['batch']}"
    )


def sized(settings: Settings, sizes: Mapping[str, int]) -> Settings:
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
    return replace(settings, entries=entries | changed)


def _trial(
    settings: Settings, sizes: Mapping[str, int], start: Mapping[str, int], symptom: Symptom, number: int
) -> object:
    """Train with other sizes. Returns the played steps as plain data; None where the sizes make no run."""
    chosen = settings if sizes == start else sized(settings, sizes)
    try:
        played = chosen.player(SCRATCH).play(symptom.step)
    except TargetError:
        raise
    except (UserError, ValueError) as error:
        print(f"  trial {number}: {_text(sizes)}: no run: {error}", flush=True)
        return None
    state = "symptom" if symptom.present(played) else "no symptom"
    print(f"  trial {number}: {_text(sizes)}: {state}", flush=True)
    return played.to_json()


def defconfig(settings: Settings, sizes: Mapping[str, int], run: str) -> str:
    """Return the shortest defconfig of a study of the run alone, with other sizes."""
    entries = dict(sized(settings, sizes).entries)

    def text(name: str, value: str) -> Entry:
        return Entry(name, value, True, "shrink")

    def number(name: str, value: int) -> Entry:
        return Entry(name, str(value), False, "shrink")

    entries |= {
        "STUDY_NAME": text("STUDY_NAME", f"shrink-{run}"[:64]),
        "VARIANTS": text("VARIANTS", settings.variant),
        "SEEDS": number("SEEDS", settings.seed + 1),
        "GPT2_MAX_ITERS": number("GPT2_MAX_ITERS", settings.iterations),
        "GPT2_MAX_TIME": number("GPT2_MAX_TIME", 0),
        "GPT2_MAX_TOKENS": number("GPT2_MAX_TOKENS", 0),
        "HELLASWAG": Entry("HELLASWAG", "n", False, "shrink"),
    }
    for name in ("SIZES", "LEARNING_RATES", "PRIMARY"):
        entries.pop(name, None)
    lines = "".join(f"{entry}\n" for entry in entries.values())
    loaded = load_leniently(lines, "the smallest configuration", entries["DETECTED"].value)
    header = f"# {run} at the smallest sizes that show its symptom ({_text(sizes)})\n"
    return rules.render(loaded.tree, minimal=True, header=header)
