"""Forward the log of a run to Weights & Biases and TensorBoard without slowing training.

A process for each tracker, `python -m study.trackers KIND FOLDER`, follows metrics.jsonl of the run. Its standard input
is a pipe, which ends with the worker; it outlives the worker by at most FINISH_SECONDS. A tracker that refuses, hangs
or dies leaves its reason in track.log, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime import files, run_plan, run_record
from runtime.metrics_log import LogReader
from runtime.records import to_plain
from runtime.run_plan import RunPlan
from runtime.settings import TrackingConfig

ID_FILE = "wandb_id"
POLL_SECONDS = 1.0
FINISH_SECONDS = 20.0  # for a tracker at the end of its worker
OFFLINE_RUNS = "wandb/offline-run-*"  # in the folder of a run


class Wandb:
    """A W&B run with a fixed id. W&B continues one on the server; one on the disk it cannot, so that is replaced."""

    def __init__(self, run_dir: Path, plan: RunPlan) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        for old in run_dir.glob(OFFLINE_RUNS):
            shutil.rmtree(old)
        self.module: Any = wandb
        tracking = plan.settings.tracking
        self.module.init(
            project=tracking.wandb_project,
            name=plan.run,
            group=plan.study,
            tags=[plan.arm, f"seed {plan.seed}"],
            config=to_plain(plan),
            id=fixed_id(run_dir),
            mode=tracking.wandb_mode,
            dir=str(run_dir),
            **({"resume": "allow"} if tracking.wandb_mode == "online" else {}),
        )

    def log(self, values: dict[str, float], step: int, final: bool = False) -> None:
        if final:
            self.module.run.summary.update(values)
        else:
            self.module.log(values, step=step)

    def finish(self, failed: bool) -> None:
        self.module.finish(exit_code=int(failed))


class TensorBoard:
    """Event files in the folder tensorboard, which replace earlier ones."""

    def __init__(self, run_dir: Path, plan: RunPlan) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self.writer = SummaryWriter(str(folder))
        text = json.dumps(to_plain(plan), indent=1).replace("\n", "\n    ")
        self.writer.add_text("plan", f"    {text}", 0)

    def log(self, values: dict[str, float], step: int, final: bool = False) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self, failed: bool) -> None:
        self.writer.close()


Tracker = Wandb | TensorBoard
KINDS: dict[str, type[Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}  # by their settings


def fixed_id(run_dir: Path) -> str:
    """Return the W&B id of a run, which a resumed run continues."""
    path = run_dir / ID_FILE
    if not path.exists():
        files.write_text(path, uuid.uuid4().hex[:16])
    return files.read_text(path)


def start_tracker(kind: str, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start the process of a tracker in a session of its own."""
    command, pipe = [sys.executable, "-m", "study.trackers", kind, str(run_dir)], subprocess.PIPE
    with (run_dir / "track.log").open("ab") as log:
        return subprocess.Popen(command, stdin=pipe, stdout=log, stderr=log, start_new_session=True)


@contextlib.contextmanager
def followed_by_trackers(run_dir: Path, tracking: TrackingConfig) -> Iterator[None]:
    """Forward a run while the block runs, and up to FINISH_SECONDS longer. No process is left, and no error."""
    processes = [start_tracker(kind, run_dir) for kind in KINDS if getattr(tracking, kind)]
    try:
        yield
        end = time.monotonic() + FINISH_SECONDS
        for process in processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:  # a tracker's child processes belong to its session and end with it
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def sync_note(study_dir: Path) -> str:
    """Return the command that sends what W&B recorded offline; "" where it recorded nothing."""
    if not any(study_dir.glob(f"runs/*/{OFFLINE_RUNS}")):
        return ""
    python = os.path.relpath(sys.executable)
    command = [sys.executable if python.startswith("..") else python, "-m", "wandb", "sync"]
    return f"to send the runs to W&B:\n  {shlex.join(command)} {shlex.quote(str(study_dir))}/runs/*/{OFFLINE_RUNS}"


def main(kind: str, run_dir: Path) -> None:
    """Forward a run to a tracker, and end with all child processes."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not the cores of the run alone
    ended = threading.Event()
    threading.Thread(target=end_in_time, args=(ended,), daemon=True).start()
    try:
        forward(KINDS[kind](run_dir, run_plan.load(run_dir / run_plan.FILE)), run_dir, ended)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    os.killpg(os.getpid(), signal.SIGKILL)


def end_in_time(ended: threading.Event) -> None:
    """Wait for the end of the worker, however it ends; kill this process and its children FINISH_SECONDS later."""
    sys.stdin.buffer.read()
    ended.set()
    time.sleep(FINISH_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


def forward(tracker: Tracker, run_dir: Path, ended: threading.Event) -> None:
    """Follow the run until its worker has ended. A step that a resumed run repeats is sent once."""
    reader, last = LogReader(run_dir / "metrics.jsonl"), False
    sent = {"train": -1, "validation": -1}  # event -> its last iteration
    while not last:
        last = ended.wait(POLL_SECONDS)
        for text in reader.read():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged line
                line = json.loads(text)
                event, step = line["event"], line.get("iteration", 0)
                if step > sent.get(event, step):
                    sent[event] = step
                    tracker.log(metric_values(event, line), step)
    record = run_record.load(run_dir)
    if record.progress:
        tracker.log(final_values(record.to_json()), record.progress.iterations, final=True)
    tracker.finish(failed=record.status != "finished")


def metric_values(event: str, line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl under their names in trackers. Training alone has tokens."""
    del line["iteration"]
    if event == "validation":
        del line["tokens"]
    return {f"{event}/{key}": value for key, value in line.items() if isinstance(value, (int, float))}


def final_values(record: dict[str, Any]) -> dict[str, float]:
    """Return the final numbers of a record, those left out that the last validation has."""
    found: dict[str, float] = {}
    for group in ("validation", "hellaswag", "choice", "memory", "throughput"):
        for key, value in (record.get(group) or {}).items():
            if isinstance(value, (int, float)) and key not in ("loss", "perplexity"):
                found[f"{group}/{key}"] = value
    learned = (record.get("learned") or {}).get("alternation_probability") or []
    return found | {f"alternation/layer_{layer:02d}": p for layer, p in enumerate(learned)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
