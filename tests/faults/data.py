"""Faults of the data: shards that differ from the manifest, shards that shrink while they are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.harness import Bench, fault, outcome
from tests.faults.workplace import PATIENCE_SECONDS, Workplace, wait_for, write_stories

NAMED = (
    "the shard is named with `make data` before any training; `make data` mends it; the undisturbed numbers"
)


def with_own_data(bench: Bench) -> tuple[Workplace, Path]:
    """Return a workplace with separate data, and its training shard."""
    place = bench.workplace(DATA_DIR="data")
    assert place.command("scripts.data").returncode == 0
    (shard,) = place.folder.glob("data/*/train-000.bin")
    return place, shard


def harmed(bench: Bench, harm: Callable[[Path], None], before: dict[str, Any] | None = None) -> str:
    """before: a fault that stops a first `make`."""
    place, shard = with_own_data(bench)
    if before:
        place.make(before)
    steps = place.steps()
    harm(shard)
    done = place.command("scripts.study")
    named = done.returncode == 1 and shard.name in done.stdout and "make data" in done.stdout
    if not named or place.steps() != steps:
        return f"not named: {done.stdout[-300:]}"
    mended = place.command("scripts.data")
    second = place.command("scripts.study")
    same = second.returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(mended.returncode == 0 and same, NAMED, f"{mended.stdout[-200:]} {second.stdout[-300:]}")


@fault("a data shard of an odd number of bytes", NAMED)
def odd(bench: Bench) -> str:
    return harmed(bench, lambda shard: shard.write_bytes(shard.read_bytes() + b"x"))


@fault("an empty data shard", NAMED)
def empty(bench: Bench) -> str:
    return harmed(bench, lambda shard: shard.write_bytes(b""))


@fault("a short data shard", NAMED)
def short(bench: Bench) -> str:
    return harmed(bench, lambda shard: shard.write_bytes(shard.read_bytes()[:-200]))


@fault("a missing data shard", NAMED)
def missing(bench: Bench) -> str:
    return harmed(bench, Path.unlink)


@fault("a flipped bit in a data shard of a study that has run before, size and times unchanged", NAMED)
def bit_rot(bench: Bench) -> str:
    def harm(shard: Path) -> None:
        before = shard.stat()
        content = bytearray(shard.read_bytes())
        content[100] ^= 1
        shard.write_bytes(content)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))

    return harmed(bench, harm, {"place": "step", "at": 10, "action": "TERM"})


SHRUNK = "killed by SIGBUS, explained by the study; after `make data` the undisturbed numbers"


@fault("a data shard that is cut short while it is read", SHRUNK)
def shrunk(bench: Bench) -> str:
    place, shard = with_own_data(bench)
    content = shard.read_bytes()
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 5)
    with shard.open("r+b") as file:
        file.truncate(0)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    error = str(place.record()["error"])
    explained = process.returncode == 1 and "SIGBUS" in error and "make data" in error
    shard.write_bytes(content[:10])
    mended = place.command("scripts.data")
    second = place.command("scripts.study")
    same = not mended.returncode and not second.returncode and place.numbers() == bench.undisturbed()
    return outcome(explained and same, SHRUNK, f"{error} {output[-300:]} {second.stdout[-300:]}")


OTHER_DATA = "refused, naming data and validation; with the texts as they were, the undisturbed numbers"


@fault("texts that change between two `make` of one run", OTHER_DATA)
def changed_texts(bench: Bench) -> str:
    texts = write_stories(bench.folder / "changing")
    place = bench.workplace(DATA_DIR="data", DATASET_FILES=str(texts / "*.txt"))
    place.make({"place": "step", "at": 30, "action": "TERM"})
    story = texts / "07.txt"
    before, stat = story.read_text(), story.stat()
    story.write_text(before + "The end.")
    done = place.make()
    refused = done.returncode == 1 and "data" in str(place.record()["error"]) and place.status() == "failed"
    story.write_text(before)
    os.utime(story, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = place.make()
    same = second.returncode == 0 and place.numbers()["losses"] == bench.undisturbed()["losses"]
    return outcome(
        refused and same, OTHER_DATA, f"{place.record()['error']} {done.stdout[-300:]} {second.stdout[-200:]}"
    )


@fault(
    "SIGKILL while data are prepared",
    "no partial corpus is used, no process is left; the next `make` prepares the data",
)
def killed_preparation(bench: Bench) -> str:
    texts = write_stories(bench.folder / "many")
    for number in range(40):
        (texts / f"more-{number}.txt").write_text(
            f"Chapter {number}. " + "It was a dark and stormy night. " * 8000
        )
    place = bench.workplace(DATA_DIR="data", DATASET_FILES=str(texts / "*.txt"), DATA_WORKERS="2")
    process = place.start("scripts.data")
    wait_for(lambda: list(place.folder.glob("data/.*.tmp/train-000.bin")) or process.poll() is not None)
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)  # returns when no process holds its output
    wait_for(lambda: not [words for words in place._processes() if "python" in words])
    half = list(place.folder.glob("data/*/manifest.json"))
    second = place.command("scripts.data")
    whole = list(place.folder.glob("data/*/manifest.json"))
    left = list(place.folder.glob("data/.*.tmp"))
    good = not half and second.returncode == 0 and len(whole) == 1 and not left
    expected = "no partial corpus is used, no process is left; the next `make` prepares the data"
    return outcome(good, expected, f"{half} {whole} {left} {second.stdout[-300:]}")


@fault(
    "a data file with a newline and shell characters in its name",
    "read like any other, nothing is run",
    quick=True,
)
def strange_name(bench: Bench) -> str:
    texts = write_stories(bench.folder / "strange")
    (texts / "a\nb $(touch ran); `touch ran`.txt").write_text("Once upon a time. " * 40)
    place = bench.workplace(DATA_DIR="data", DATASET_FILES=str(texts / "*.txt"))
    done = place.here("scripts.data")
    good = done.returncode == 0 and "81 documents" in done.stdout and not (place.folder / "ran").exists()
    return outcome(good, "read like any other, nothing is run", done.stdout[-300:])


KEPT = "prepared data are removed, the texts are not; `make` ends at the same numbers"


@fault("make clean with texts in a folder of data/ that is named like prepared data", KEPT)
def texts_among_prepared_data(bench: Bench) -> str:
    place = bench.workplace(DATA_DIR="data")
    texts = place.folder / "data" / "books-202611220830"
    shutil.copytree(place.texts, texts)
    place.configure(DATA_DIR="data", DATASET_FILES="data/books-202611220830/*.txt")
    before = place.make()
    numbers = place.numbers()
    prepared = {path for path in (place.folder / "data").iterdir() if (path / "manifest.json").exists()}
    cleaned = place.command("scripts.dev.clean", "data")
    removed = bool(prepared) and not any(path.exists() for path in prepared)
    kept = sorted(path.name for path in texts.iterdir()) == sorted(
        path.name for path in place.texts.iterdir()
    )
    shutil.rmtree(place.run_dir())
    after = place.make()
    same = not before.returncode and not after.returncode and place.numbers() == numbers
    return outcome(removed and kept and same, KEPT, f"{removed} {kept} {same} {cleaned.stdout[-300:]}")


COUNTED = "the report says how many lines are missing, and the losses are those of the undisturbed study"


@fault("metrics.jsonl deleted while a run trains", COUNTED)
def metrics_deleted(bench: Bench) -> str:
    place = bench.workplace()
    process = place.start(**bench.slow)
    wait_for(lambda: place.steps() > 5)
    (place.run_dir() / "metrics.jsonl").unlink()
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    report = (place.study / "report.md").read_text()
    named = "metrics.jsonl" in report
    same = place.numbers()["validation"] == bench.undisturbed()["validation"]
    return outcome(
        named and same, COUNTED, f"{named} {same} {process.returncode} {output[-500:]} {report[:900]}"
    )
