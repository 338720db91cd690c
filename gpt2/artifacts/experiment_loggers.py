"""Weights & Biases and trackio, never in the way of training.

A tracker runs beside the training process as a process of its own, `python -m
gpt2.artifacts.experiment_loggers RUN_DIR TRACKER MODE PROJECT
STUDY_PID`, which follows metrics.jsonl and run.json and forwards them. Training never imports a tracker and never waits
for one: a tracker that refuses, hangs or dies leaves a line in track.log and nothing else, and none outlives its study
by more than FINISH_SECONDS.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2.config.config import TrackingConfig

POLL_SECONDS = 1.0
FINISH_SECONDS = 20.0  # that a tracker has at the end of a run, or after the death of the study, at most


class ExperimentLoggers:
    """The sidecars of one run. `finish` waits a bounded time, then ends them."""

    def __init__(self, run_dir: Path, tracking: TrackingConfig) -> None:
        self.run_dir = run_dir
        self.processes: list[subprocess.Popen[bytes]] = []
        self.wandb_offline = tracking.wandb and tracking.wandb_mode == "offline"
        wanted = [("wandb", tracking.wandb_mode, tracking.wandb_project)] if tracking.wandb else []
        wanted += (
            [("trackio", "local", tracking.wandb_project or "gpt2-ra-ablation")] if tracking.trackio else []
        )
        self.names = [name for name, _, _ in wanted]
        for arguments in wanted:
            with (run_dir / "track.log").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            "gpt2.artifacts.experiment_loggers",
                            str(run_dir),
                            *arguments,
                            str(os.getpid()),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def finish(self, seconds: float = FINISH_SECONDS) -> str | None:
        """Let them send what is left, for so many seconds in all; the command to sync later, where there is one.

        Whatever interrupts the waiting, no process is left: a tracker's helpers belong to its session and go with it.
        """
        deadline = time.monotonic() + seconds
        late = False
        try:
            for process in self.processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    late = True
        finally:
            for process in self.processes:
                end_session(process)
        folders = sorted((self.run_dir / "wandb").glob("*run-2*"))  # not the link latest-run
        if folders and (self.wandb_offline or late):
            return f"to send this run to W&B:\n  {command('wandb', 'sync', str(folders[-1]))}"
        bad = [name for name, process in zip(self.names, self.processes, strict=True) if process.returncode]
        return f"{' and '.join(bad)} did not finish, see {self.run_dir / 'track.log'}" if bad else None


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and of the helpers that it started, and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_after_parent(parent: int, seconds: float) -> None:
    """From now on: `seconds` after the death of `parent`, even one before this call, this process's group is killed.

    A thread looks, so that the process may hang in whatever it does. The process must lead its group.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        time.sleep(max(0.0, seconds - POLL_SECONDS))  # it may have been dead for as long as that
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-after-parent", daemon=True).start()


def command(module: str, *arguments: str) -> str:
    """A shell command for this interpreter, which may be an environment's that is not on the PATH."""
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    return shlex.join([python, "-m", module, *arguments])


def metric_names(line: dict[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl under the stable names that the trackers show.

    train/tokens is the axis of both kinds of line; validation/tokens, in the summary, is how many are scored.
    """
    kind = line.get("event")
    if kind not in ("train", "validation"):
        return {}
    keys = {
        "train": (
            "loss",
            "learning_rate",
            "grad_norm",
            "tokens_per_second",
            "memory_bytes",
            "train_seconds",
        ),
        "validation": ("loss", "perplexity"),
    }[kind]
    found = {f"{kind}/{key}": line[key] for key in keys if line.get(key) is not None}
    return found | {"train/tokens": line["tokens"]}


def summary(record: dict[str, Any]) -> dict[str, float]:
    """The final numbers of a record under stable names."""
    found: dict[str, float] = {}
    for group in ("validation", "hellaswag", "memory", "throughput"):
        for key, value in (record.get(group) or {}).items():
            if isinstance(value, (int, float)):
                found[f"{group}/{key}"] = value
    learned = (record.get("learned") or {}).get("alternation_probability") or []
    return found | {f"alternation/layer_{layer:02d}": p for layer, p in enumerate(learned)}


def new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines behind `offset`, and where the next ones will begin; a shortened file is read anew."""
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < offset:
            offset = 0
        file.seek(offset)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(text) for text in whole.splitlines()], offset + len(whole)


def follow(run_dir: Path, parent: int) -> Iterator[dict[str, Any]]:
    """Lines as they appear, until the record is final or the parent is gone."""
    offset = 0
    while True:
        final = _status(run_dir) in ("finished", "failed", "interrupted") or os.getppid() != parent
        lines, offset = new_lines(run_dir / "metrics.jsonl", offset)
        yield from lines
        if final:
            return
        time.sleep(POLL_SECONDS)


def _record(run_dir: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
        return value
    except (OSError, ValueError):
        return {}


def _status(run_dir: Path) -> str:
    return str(_record(run_dir).get("status"))


def settings(run_dir: Path) -> dict[str, str]:
    """The run's configuration, quotes taken off."""
    path = run_dir / "config"
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.split("=", 1) for line in lines if line.startswith("CONFIG_") and "=" in line)
    return {name: value.removeprefix('"').removesuffix('"') for name, value in pairs}


def main(arguments: list[str]) -> None:
    """Forward one run to one tracker; trackio has wandb's interface."""
    folder, tracker, mode, project, study = arguments
    run_dir, parent = Path(folder), int(study)
    end_after_parent(parent, FINISH_SECONDS)
    try:
        forward(run_dir, parent, tracker, mode, project)
    finally:
        if os.getppid() != parent:  # nobody is left to end what the tracker started
            os.killpg(os.getpid(), signal.SIGKILL)


def forward(run_dir: Path, parent: int, tracker: str, mode: str, project: str) -> None:
    """Follow the run to its end, or to its study's."""
    client = importlib.import_module(tracker)
    options: dict[str, Any] = {
        "project": project,
        "name": run_dir.name,
        "group": run_dir.absolute().parent.parent.name,  # the study
        "config": settings(run_dir),
    }
    if tracker == "wandb":
        os.environ.setdefault("WANDB_SILENT", "true")
        options |= {"mode": mode, "dir": str(run_dir)}
    client.init(**options)
    for line in follow(run_dir, parent):
        values = metric_names(line)
        if values:
            client.log(values, step=int(line["iteration"]))
    record = _record(run_dir)
    client.log(summary(record), step=int((record.get("progress") or {}).get("iterations", 0)))
    ended = {} if record.get("status") == "finished" or tracker != "wandb" else {"exit_code": 1}
    client.finish(**ended)


if __name__ == "__main__":
    main(sys.argv[1:])
