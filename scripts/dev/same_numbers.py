"""Compare the numbers of small training runs at two commits, bit by bit.

    python -m scripts.dev.same_numbers BASE      BASE against HEAD, in two worktrees: minutes on two cores

Each side trains STUDIES through make by its copy of this file, and writes lines of run, kind, step and value. Kinds are
losses, gradient norms and learning rates of each step, validation losses, and SHA-256 of batches and of the weights
after the last step. Run it for every commit that moves or rewrites code and should change no number.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2 import dataset
from runtime.errors import UserError, run_command
from runtime.files import read_json

DEFCONFIG = "defconfig-gpt2-ra-ablation-smoke+cpu"
BATCH, BLOCK, VALIDATION = 4, 32, 512  # sequences, tokens of a sequence, validation tokens
STEPS, MANY_STEPS = 24, 200  # the killed run needs time between its checkpoint and its end
# One thread, since another number may sum in another order; one run at once, so that one is killed in its decay. The
# rate is large, so that attention leaves its initial, almost uniform weights.
SETTINGS = (
    f"SEEDS=1 GPT2_MODEL_CUSTOM=y GPT2_LAYERS=3 GPT2_HEADS=2 GPT2_WIDTH=32 GPT2_BLOCK_SIZE={BLOCK} CPU_THREADS=1 "
    f"SLOTS=1 GPT2_MAX_ITERS={STEPS} EFFECTIVE_BATCH={BATCH} MICRO_BATCH=2 LEARNING_RATE=1e-2 HELLASWAG=n "
    f"EVAL_TOKENS={VALIDATION} EVAL_INTERVAL_TOKENS=1024 DATASET_FILES=texts/*.txt"
)
MODIFIED = "RALEARN+NORM=rms+MLP=swiglu+POSITION=rotary"
KILLED = "killed"
STUDIES = {  # name -> arms, further settings
    "arms": (f"B RAALL RALEARN GATED DIFFERENTIAL VALUERES {MODIFIED} B+AQN=qerl", ""),
    KILLED: (
        "RALEARN B",
        f"ALTERNATION_MIX_SCORE=y SCHEDULE_WSD=y DECAY_FRACTION=0.6 GPT2_MAX_ITERS={MANY_STEPS}",
    ),
    "dropout": ("RALEARN B", "ALTERNATION_MIX_HARD=y ALTERNATION_GATE_EVERY=2 GPT2_DROPOUT=0.1"),
    "bfloat16": ("B RALEARN", "DTYPE_BFLOAT16=y"),
    "ranks": ("B", "RANKS=2"),
}
FIELDS = ("tokens", "loss", "grad_norm", "learning_rate", "expected")  # of metrics.jsonl; no times
Line = tuple[str, str, Any, str]  # run, kind, step, value


def write(path: Path) -> None:
    """Train STUDIES in the current folder, a clean checkout, and write their numbers to `path`."""
    os.environ.update(RA_DETECTED="cpu", OMP_NUM_THREADS="1")
    Path("texts").mkdir()
    for number in range(80):
        words = [f"story{number * k * k % 97} of {k % (number + 2)}" for k in range(40)]
        Path("texts", f"{number:02d}.txt").write_text(" ".join(words))
    lines: list[Line] = []
    for study, (arms, settings) in STUDIES.items():
        values = [f"STUDY_NAME={study}", f"VARIANTS={arms}", *SETTINGS.split(), *settings.split()]
        make(DEFCONFIG, *(f"CONFIG_{value}" for value in values))
        if study == KILLED:
            kill_first_run(Path("results", study))
        make()
        for run in sorted(Path("results", study, "runs").glob("*/")):
            lines += run_lines(run, f"{study}/{run.name}")
    (corpus,) = Path("data").glob("*/manifest.json")
    lines += batch_lines(corpus.parent)
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))


def make(*words: str) -> None:
    subprocess.run(["make", f"PYTHON={sys.executable}", *words], check=True)


def kill_first_run(study: Path) -> None:
    """Start the study and send SIGKILL to its processes after the first run's checkpoint in `stable`."""
    with subprocess.Popen(["make", f"PYTHON={sys.executable}"], start_new_session=True) as process:
        while not any(study.glob("runs/*/stable/[0-9]*")) and process.poll() is None:
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its training process ends with it
    states = [read_json(record)["status"] for record in study.glob("runs/*/run.json")]
    if states != ["running"]:
        raise UserError(f"SIGKILL came when runs of {study} were {states}, not in a decay; fix: try again")


def run_lines(run: Path, name: str) -> Iterator[Line]:
    """Yield the numbers of a finished run."""
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for field in filter(line.__contains__, FIELDS):
            value = line[field]
            exact = value.hex() if isinstance(value, float) else str(value)
            yield name, f"{line['event']} {field}", line["iteration"], exact
    yield name, "status", 0, read_json(run / "run.json")["status"]
    for state in sorted(run.glob("*/[0-9]*/state.pt")):  # checkpoint/ and, of a WSD schedule, stable/
        for weight, digest in weight_digests(state):
            yield name, f"{state.parts[-3]} {weight}", state.parts[-2], digest


def weight_digests(state: Path) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of every weight in a checkpoint."""
    import torch

    for name, weight in torch.load(state, map_location="cpu", weights_only=True)["model"].items():
        content = weight.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, hashlib.sha256(f"{weight.dtype} {tuple(weight.shape)}".encode() + content).hexdigest()


def batch_lines(corpus: Path) -> Iterator[Line]:
    """Yield the SHA-256 of batches and of the validation windows, by the functions that the trainer calls."""
    opened = dataset.open_corpus(corpus)
    train = opened.train
    for seed, step in itertools.product((0, 1), range(MANY_STEPS)):
        numbers = dataset.window_numbers(len(train), BLOCK, BATCH, seed, step)
        digest = hashlib.sha256(train.windows(numbers, BLOCK).tobytes()).hexdigest()
        yield f"batches of seed {seed}", "batch", step + 1, digest
    windows = dataset.validation_windows(opened.validation, BLOCK, VALIDATION)
    yield "validation windows", "batch", 0, hashlib.sha256(windows.tobytes()).hexdigest()


def differences(base: str, head: str) -> list[str]:
    """Return the first difference of each run; none where the two files are equal."""
    sides: list[dict[tuple[str, ...], list[str]]] = [defaultdict(list), defaultdict(list)]
    for side, text in zip(sides, (base, head), strict=True):
        for line in text.splitlines():
            *key, value = line.split("\t")
            side[tuple(key)].append(value)  # two values where a run logged a step twice
    found: dict[str, list[str]] = defaultdict(list)
    for run, kind, step in sides[0] | sides[1]:
        values = [" and ".join(side.get((run, kind, step), ["absent"])) for side in sides]
        if values[0] != values[1]:
            found[run].append(f"{kind} at step {step} is {values[0]} at base, {values[1]} at head")
    lines = [f"{run}: {texts[0]} ({len(texts)} values differ)" for run, texts in found.items()]
    return lines if lines or base == head else ["the order of the lines differs"]


def compare(base: str, head: str) -> int:
    """Print the first difference of each run of two written files. Return the exit status."""
    found = differences(base, head)
    if found:
        print(*found, "numbers changed: raise NUMBERS, or undo", sep="\n")
        return 1
    runs = {line.split("\t")[0] for line in head.splitlines()}
    print(
        f"same numbers: {len(head.splitlines()):,} values of {len(runs)} runs and series of batches are equal"
    )
    return 0


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"git {' '.join(words)}: {done.stderr.strip()}; fix: name a commit of this repository"
        )
    return done.stdout


def train(tree: Path, commit: str) -> subprocess.Popen[bytes]:
    """Check out a commit and start its copy of this command. The output goes to files beside the tree."""
    git("worktree", "add", "--detach", str(tree), commit)
    if not (tree / "scripts/dev/same_numbers.py").exists():
        raise UserError(f"{commit} has no scripts/dev/same_numbers.py; fix: name a later commit")
    dropped = ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "MAKE_GOALS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    words = [sys.executable, "-m", "scripts.dev.same_numbers", "--write", str(tree.with_suffix(".tsv"))]
    with tree.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(words, cwd=tree, env=environment, stdout=log, stderr=subprocess.STDOUT)


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--write":
        write(Path(sys.argv[2]))
        return 0
    if len(sys.argv) != 2:
        raise UserError("no commit to compare with; fix: python -m scripts.dev.same_numbers main")
    if git("status", "--porcelain"):
        print("head is the last commit: uncommitted changes are not compared")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trees = {Path(folder, "base"): sys.argv[1], Path(folder, "head"): "HEAD"}
        try:
            sides = {tree: train(tree, commit) for tree, commit in trees.items()}
            for tree in [tree for tree, process in sides.items() if process.wait()]:
                print(*tree.with_suffix(".log").read_text(errors="replace").splitlines()[-15:], sep="\n")
                raise UserError(f"{tree.name} has no numbers to compare; fix: see the lines above")
            status = compare(*(tree.with_suffix(".tsv").read_text() for tree in trees))
        finally:
            for tree in filter(Path.exists, trees):
                git("worktree", "remove", "--force", str(tree))
    print(f"{time.monotonic() - began:.0f} s")
    return status


if __name__ == "__main__":
    run_command(main)
