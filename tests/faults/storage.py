"""Faults of the disk: damaged checkpoints, no space, no permission."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch

from tests.faults.harness import Bench, CannotDoError, fault, in_namespace, outcome
from tests.faults.workplace import Workplace, injected, wait_for

PREVIOUS = "passed over for the one before, named in the report; ends at the undisturbed numbers"


def damaged(bench: Bench, harm: Callable[[Path], None], expected: str = PREVIOUS) -> str:
    """Damage the newest of two checkpoints of an interrupted study and run `make`."""
    place = bench.interrupted()
    found = place.checkpoints()
    if len(found) != 2:
        return f"{len(found)} checkpoints instead of two"
    harm(found[-1])
    done = place.make()
    reported = found[-1].name in (place.study / "report.md").read_text()
    same = place.numbers() == bench.undisturbed()
    return outcome(
        not done.returncode and reported and same,
        expected,
        f"reported {reported} same {same} {done.stdout[-300:]}",
    )


@fault("a flipped bit in the newest checkpoint", PREVIOUS)
def flipped_bit(bench: Bench) -> str:
    def harm(path: Path) -> None:
        content = bytearray((path / "state.pt").read_bytes())
        content[len(content) // 2] ^= 4
        (path / "state.pt").write_bytes(content)

    return damaged(bench, harm)


@fault("the newest checkpoint cut short", PREVIOUS)
def truncated(bench: Bench) -> str:
    return damaged(
        bench, lambda path: (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:1000])
    )


@fault("the newest checkpoint without its checksums", PREVIOUS)
def without_sums(bench: Bench) -> str:
    return damaged(bench, lambda path: (path / "SHA256SUMS").unlink())


def replaced(path: Path, content: bytes) -> None:
    """Another content of a checkpoint's file, with a valid checksum."""
    path.write_bytes(content)
    sums = path.with_name("SHA256SUMS")
    lines = [line for line in sums.read_text().splitlines() if not line.endswith(f"  {path.name}")]
    sums.write_text("\n".join([*lines, f"{sha256(content).hexdigest()}  {path.name}"]) + "\n")


@fault("a checkpoint with another iteration in its meta.json, with a valid checksum", PREVIOUS)
def another_iteration(bench: Bench) -> str:
    def harm(path: Path) -> None:
        meta = json.loads((path / "meta.json").read_text())
        replaced(path / "meta.json", json.dumps(meta | {"iteration": 1_000_000_000}).encode())

    return damaged(bench, harm)


@fault("a checkpoint with a tensor of another shape, with a valid checksum", PREVIOUS)
def another_shape(bench: Bench) -> str:
    def harm(path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True)
        state["model"][next(iter(state["model"]))] = torch.zeros(3)
        content = io.BytesIO()
        torch.save(state, content)
        replaced(path / "state.pt", content.getvalue())

    return damaged(bench, harm)


class Malicious:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return exec, (f"open({str(self.mark)!r}, 'w').write('ran')",)


@fault(
    "a checkpoint that carries code, with a valid checksum",
    "refused without running it; " + PREVIOUS,
)
def malicious(bench: Bench) -> str:
    mark = bench.folder / "ran"

    def harm(path: Path) -> None:
        replaced(path / "state.pt", pickle.dumps({"model": Malicious(mark)}))

    found = damaged(bench, harm)
    return f"refused without running it; {found}" if not mark.exists() else f"IT RAN; {found}"


@fault("both checkpoints damaged", "an error that names them and the remedy; no run restarts silently")
def both_damaged(bench: Bench) -> str:
    place = bench.interrupted()
    for path in place.checkpoints():
        (path / "state.pt").write_bytes(b"")
    done = place.make()
    error = str(place.record()["error"])
    good = done.returncode == 1 and place.status() == "failed" and "has no complete checkpoint" in error
    expected = "an error that names them and the remedy; no run restarts silently"
    return outcome(good and "delete the run's folder" in error, expected, f"{error} {done.stdout[-300:]}")


def on_small_disk(place: Workplace, mebibytes: int) -> tuple[str, ...]:
    """Return the prefix of commands that mount a file system of that size for the results of a workplace."""
    prefix = in_namespace()
    (place.folder / "results").mkdir()
    script = place.folder / "small.sh"
    script.write_text(
        f'mount -t tmpfs -o size={mebibytes}m tmpfs results || exit 77\n"$@"\nstatus=$?\n'
        "cp -a results/. kept/ 2>/dev/null\nexit $status\n"
    )
    (place.folder / "kept").mkdir()
    return (*prefix, "sh", str(script))


FULL = "the run stops cleanly, what is exhausted is named, the checkpoint is whole; after that, same numbers"


def exhausted(bench: Bench, fill: str, named: str) -> str:
    """Exhaust the results' disk by a shell command once the run is under way, copy the results, and continue."""
    place = bench.workplace()
    prefix = on_small_disk(place, 400)
    script = place.folder / "small.sh"
    script.write_text(
        script.read_text().replace(
            '"$@"\nstatus=$?\n',
            '"$@" & pid=$!\n'
            f"while ! ls results/{place.study.name}/runs/B0/checkpoint/0* >/dev/null 2>&1; do sleep 0.05; done\n"
            f"{fill}\n"
            "wait $pid; echo FIRST $?\n"
            f"ls results/{place.study.name}/runs/B0/checkpoint\n"
            "rm -r results/filler\nstatus=0\n",
        )
    )
    done = place.command("scripts.study", prefix=prefix, **injected(None, slower=0.3))
    if done.returncode == 77:
        raise CannotDoError("no file system can be mounted here")
    (place.folder / "results").rmdir()
    (place.folder / "kept").rename(place.folder / "results")
    first = "FIRST 1" in done.stdout and named in done.stdout
    bench.make(place)
    same = place.status() == "finished" and place.numbers() == bench.undisturbed()
    return outcome(first and same, FULL, f"first {first} same {same} {done.stdout[-600:]}")


@fault("the disk fills up while it trains", FULL, quick=True)
def disk_full(bench: Bench) -> str:
    return exhausted(bench, "cat /dev/zero > results/filler 2>/dev/null", "no free disk space for")


@fault("the disk has no free inodes while it trains", FULL)
def no_inodes(bench: Bench) -> str:
    fill = (
        "mount -o remount,nr_inodes=1000 results && mkdir results/filler && "
        "(cd results/filler; seq 2000 | xargs touch 2>/dev/null)"
    )
    return exhausted(bench, fill, "has no free inodes")


@fault(
    "too little space for the study",
    "refused before the first run, with what is needed and what there is",
    quick=True,
)
def too_small(bench: Bench) -> str:
    place = bench.workplace()
    prefix = on_small_disk(place, 30)
    done = place.command("scripts.study", prefix=prefix)
    good = done.returncode == 1 and "of free space; 1 runs need about" in done.stdout and not place.steps()
    return outcome(
        good, "refused before the first run, with what is needed and what there is", done.stdout[-400:]
    )


LIMITED = "the run stops cleanly, the study names the limit; after that, same numbers"


@fault("files may not grow (ulimit -f)", LIMITED)
def file_size_limit(bench: Bench) -> str:
    place = bench.workplace()
    done = place.command("scripts.study", prefix=("prlimit", "--fsize=1048576"), **bench.slow)
    named = "exceeds the limit of file sizes of 1 MiB (ulimit -f)" in done.stdout
    first = done.returncode == 1 and named and place.status() == "interrupted"
    second = place.make()
    same = second.returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(first and same, LIMITED, f"first {first} same {same} {done.stdout[-400:]}")


@fault(
    "a results directory that cannot be written",
    "a clear error at the start, naming CONFIG_RESULTS_DIR",
    quick=True,
)
def read_only(bench: Bench) -> str:
    place = bench.workplace(RESULTS_DIR="/sys/results")  # not even root may make a folder there
    done = place.here("scripts.study")
    good = done.returncode == 1 and "cannot be written" in done.stdout and "CONFIG_RESULTS_DIR" in done.stdout
    return outcome(good, "a clear error at the start, naming CONFIG_RESULTS_DIR", done.stdout[-300:])


@fault("a torn line at the end of metrics.jsonl", "dropped; ends at the undisturbed numbers")
def torn_metrics(bench: Bench) -> str:
    place = bench.workplace()
    place.make({"place": "step", "at": 32, "action": "TERM"})
    wait_for(lambda: not place.orphans())
    with (place.run_dir() / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "iteration": 33, "lo')
    done = place.make()
    same = done.returncode == 0 and place.numbers() == bench.undisturbed()
    return outcome(same, "dropped; ends at the undisturbed numbers", done.stdout[-300:])
