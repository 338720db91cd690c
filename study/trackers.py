"""Forward runs to Weights & Biases and TensorBoard without slowing training.

Each logger is a process beside the training process: `python -m study.trackers RUN_DIR LOGGER MODE
PROJECT STUDY_PID`. It follows metrics.jsonl and run.json and forwards them. Training neither imports a logger nor waits
for one. A logger that refuses, hangs or dies leaves a line in track.log. None outlives its study by more than
FINISH_SECONDS.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime import files, run_record
from runtime.dotconfig import ConfigError, read_symbols
from runtime.files import DamagedFileError, open_regular, parse_json, read_text
from runtime.run_record import RecordError, RunRecord
from runtime.settings import TrackingConfig

ID_FILE = "wandb_id"
Value = float | str


class Client(Protocol):
    """An open run of a tracker."""

    def log(self, values: Mapping[str, Value], step: int) -> None:
        """Log values of one step."""

    def summarize(self, values: Mapping[str, Value], step: int) -> None:
        """Log the values of the whole run."""

    def finish(self, failed: bool) -> None:
        """Write everything and close."""


@dataclass(frozen=True)
class Opening:
    """The description of a run. folder: of the run; mode: of W&B, online or offline."""

    folder: Path
    project: str
    name: str
    group: str
    tags: tuple[str, ...]
    config: Mapping[str, str]
    mode: str
    job_type: str = "train"


class WandbClient:
    """A W&B run with a fixed id: online, a run that exists is continued and its logged steps are kept."""

    def __init__(self, opening: Opening) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        self.module: Any = importlib.import_module("wandb")
        resume = {"resume": "allow"} if opening.mode == "online" else {}  # W&B cannot resume offline
        self.module.init(
            project=opening.project,
            name=opening.name,
            group=opening.group,
            tags=list(opening.tags),
            job_type=opening.job_type,
            config=dict(opening.config),
            id=fixed_id(opening.folder),
            mode=opening.mode,
            dir=str(opening.folder),
            **resume,
        )

    def log(self, values: Mapping[str, Value], step: int) -> None:
        self.module.log(dict(values), step=step)

    def summarize(self, values: Mapping[str, Value], step: int) -> None:
        self.module.run.summary.update(dict(values))

    def finish(self, failed: bool) -> None:
        self.module.finish(**({"exit_code": 1} if failed else {}))


class TensorBoardClient:
    """Event files in the folder tensorboard, which replace earlier ones. Text goes to the text tab."""

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = opening.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(folder))
        about = {"group": opening.group, "tags": ", ".join(opening.tags), "job_type": opening.job_type}
        rows = [f"    {name}={value}" for name, value in (about | dict(opening.config)).items()]
        self.writer.add_text("config", "\n".join(rows), 0)

    def log(self, values: Mapping[str, Value], step: int) -> None:
        for name, value in values.items():
            (self.writer.add_text if isinstance(value, str) else self.writer.add_scalar)(name, value, step)

    summarize = log

    def finish(self, failed: bool) -> None:
        self.writer.close()


CLIENTS: dict[str, Callable[[Opening], Client]] = {
    "wandb": WandbClient,
    "tensorboard": TensorBoardClient,
}


def connect(logger: str, opening: Opening) -> Client:
    """Open a run of a tracker."""
    return CLIENTS[logger](opening)


def fixed_id(folder: Path) -> str:
    """Return the W&B id of the run in a folder: a resumed run continues it. A damaged file gets a new id."""
    path = folder / ID_FILE
    with contextlib.suppress(FileNotFoundError, DamagedFileError):
        if re.fullmatch(r"[0-9a-f]{16}", text := read_text(path)):
            return text
    run_id = uuid.uuid4().hex[:16]
    files.write_text(path, run_id)
    return run_id


def offline_folders(folder: Path) -> list[Path]:
    """Return the folders that W&B wrote, the newest last, without its link latest-run."""
    return sorted((folder / "wandb").glob("*run-2*"))


POLL_SECONDS = 1.0
MODULE = "study.trackers"
FINISH_SECONDS = 20.0  # limit for a logger at the end of a run, or after the study's death


class ExperimentLoggers:
    """The logger processes of one run. `finish` waits a limited time, then ends them.

    module: the program of the processes, which takes the arguments of `main`.
    """

    def __init__(self, run_dir: Path, tracking: TrackingConfig, module: str = MODULE) -> None:
        self.run_dir = run_dir
        self.processes: list[subprocess.Popen[bytes]] = []
        self.wandb_offline = tracking.wandb and tracking.wandb_mode == "offline"
        wanted = wanted_loggers(tracking)
        self.names = [name for name, _, _ in wanted]
        for arguments in wanted:
            with (run_dir / "track.log").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, str(run_dir), *arguments, str(os.getpid())],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def finish(self, seconds: float = FINISH_SECONDS) -> str | None:
        """Wait up to `seconds` in all for the loggers, then end them. Return the command to sync later, if needed.

        No process is left, whatever interrupts the wait. A logger's child processes belong to its session and end with
        it.
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
        folders = offline_folders(self.run_dir)
        if folders and (self.wandb_offline or late):
            return f"to send this run to W&B:\n  {command('wandb', 'sync', str(folders[-1]))}"
        bad = [name for name, process in zip(self.names, self.processes, strict=True) if process.returncode]
        return f"{' and '.join(bad)} did not finish; see {self.run_dir / 'track.log'}" if bad else None


def wanted_loggers(tracking: TrackingConfig) -> list[tuple[str, str, str]]:
    """Return (logger, mode, project) of each tracker that is switched on."""
    project = tracking.wandb_project or "gpt2-ra-ablation"
    chosen = [
        (tracking.tensorboard, "tensorboard", "local"),
        (tracking.wandb, "wandb", tracking.wandb_mode),
    ]
    return [(name, mode, project) for wanted, name, mode in chosen if wanted]


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its child processes, and reap it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_after_parent(parent: int, seconds: float) -> None:
    """Kill this process's group `seconds` after the death of `parent`, even if it died before this call.

    A thread polls, so that the process may hang. The process must lead its group.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        time.sleep(max(0.0, seconds - POLL_SECONDS))  # it may have died POLL_SECONDS ago
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-after-parent", daemon=True).start()


def command(module: str, *arguments: str) -> str:
    """Return a shell command for this interpreter, which need not be on the PATH."""
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    return shlex.join([python, "-m", module, *arguments])


def metric_names(line: dict[str, Any]) -> dict[str, float]:
    """Convert a line of metrics.jsonl to the stable names that loggers show.

    train/tokens is the axis of training and validation. validation/tokens, in the summary, is the number scored.
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
            "reward",
            "logp_diff",
        ),
        "validation": ("loss", "perplexity", "accuracy"),
    }[kind]
    found = {f"{kind}/{key}": line[key] for key in keys if line.get(key) is not None}
    return found | {"train/tokens": line["tokens"]}


def summary(record: dict[str, Any]) -> dict[str, float]:
    """Return the final numbers of a record under stable names."""
    found: dict[str, float] = {}
    for group in ("validation", "hellaswag", "choice", "memory", "throughput"):
        for key, value in (record.get(group) or {}).items():
            if isinstance(value, (int, float)):
                found[f"{group}/{key}"] = value
    learned = (record.get("learned") or {}).get("alternation_probability") or []
    return found | {f"alternation/layer_{layer:02d}": p for layer, p in enumerate(learned)}


def new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines after `offset` and the next offset. A shortened file is read from the start."""
    if not path.exists():
        return [], 0
    with open_regular(path) as file:
        if file.seek(0, os.SEEK_END) < offset:
            offset = 0
        file.seek(offset)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    lines = []
    for text in whole.splitlines():
        with contextlib.suppress(DamagedFileError):
            lines.append(parse_json(text, path))
    return lines, offset + len(whole)


def follow(run_dir: Path, parent: int) -> Iterator[dict[str, Any]]:
    """Yield lines as they appear, until the record is final or the parent is dead."""
    offset = 0
    while True:
        record = _record(run_dir)
        final = (record and record.status != "running") or os.getppid() != parent
        lines, offset = new_lines(run_dir / "metrics.jsonl", offset)
        yield from lines
        if final:
            return
        time.sleep(POLL_SECONDS)


def _record(run_dir: Path) -> RunRecord | None:
    try:
        return run_record.load(run_dir)
    except RecordError:
        return None


def settings(run_dir: Path) -> dict[str, str]:
    """Return the run's configuration without quotes."""
    try:
        entries = read_symbols(run_dir / "config").entries.values()
    except ConfigError:
        return {}
    return {f"CONFIG_{entry.name}": entry.value for entry in entries if entry.quoted or entry.value != "n"}


def main(arguments: list[str]) -> None:
    """Forward one run to one logger."""
    folder, logger, mode, project, study = arguments
    beside(int(study), lambda: forward(Path(folder), int(study), logger, mode, project))


def beside(parent: int, work: Callable[[], None]) -> None:
    """Do the work, and end with all child processes soon after the death of the parent."""
    end_after_parent(parent, FINISH_SECONDS)
    try:
        work()
    finally:
        if os.getppid() != parent:  # no parent is left to end the logger's child processes
            os.killpg(os.getpid(), signal.SIGKILL)


def forward(run_dir: Path, parent: int, logger: str, mode: str, project: str) -> None:
    """Follow the run to its end or the study's end."""
    first = _record(run_dir)
    client = connect(
        logger,
        Opening(
            folder=run_dir,
            project=project,
            name=run_dir.name,
            group=run_dir.absolute().parent.parent.name,  # the study
            tags=(first.variant, f"seed {first.seed}") if first else (),
            config=settings(run_dir),
            mode=mode,
        ),
    )
    for line in follow(run_dir, parent):
        if values := metric_names(line):
            client.log(values, int(line["iteration"]))
    record = _record(run_dir)
    if record and record.progress:
        client.summarize(summary(record.to_json()), record.progress.iterations)
    client.finish(failed=not record or record.status != "finished")


if __name__ == "__main__":
    main(sys.argv[1:])
