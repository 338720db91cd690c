"""Forward runs and verdicts to Weights & Biases and TensorBoard without slowing training.

The process `python -m study.trackers FOLDER`, beside the worker of a run, follows its metrics.jsonl; for the folder of
a study it sends the verdicts of report.json. Its standard input is a pipe, which ends with the worker. Each tracker has
a thread, so that one that hangs does not stop the other. One that refuses, hangs or dies leaves a line in track.log.
The process outlives the worker by at most FINISH_SECONDS.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime import files, run_plan, run_record
from runtime.dotconfig import ConfigError, read_symbols
from runtime.files import DamagedFileError, read_json, read_text
from runtime.metrics_log import LogReader
from runtime.settings import TrackingConfig

ID_FILE = "wandb_id"
VERDICT = "verdict"
POLL_SECONDS = 1.0
FINISH_SECONDS = 20.0  # limit for the trackers at the end of a run, or after the study's death
NAMES = {  # event -> the keys of a line of metrics.jsonl that trackers show
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
}
Value = float | str


@dataclass(frozen=True)
class Opening:
    """The description of a run, or of a study's verdicts."""

    folder: Path
    name: str
    group: str  # the study
    tags: tuple[str, ...]
    config: Mapping[str, str]
    tracking: TrackingConfig


class Tracker(Protocol):
    """An open run of a tracker."""

    def log(self, values: Mapping[str, Value], step: int, final: bool = False) -> None:
        """Log values of one step, or the final ones of the run."""

    def finish(self, failed: bool) -> None:
        """Write everything and close."""


class Wandb:
    """A W&B run with a fixed id: online, a run that exists is continued and its logged steps are kept."""

    def __init__(self, opening: Opening) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self.module: Any = wandb
        mode = opening.tracking.wandb_mode
        self.module.init(
            project=opening.tracking.wandb_project,
            name=opening.name,
            group=opening.group,
            tags=list(opening.tags),
            job_type=VERDICT if opening.name == VERDICT else "train",
            config=dict(opening.config),
            id=fixed_id(opening.folder),
            mode=mode,
            dir=str(opening.folder),
            **({"resume": "allow"} if mode == "online" else {}),  # W&B cannot resume offline
        )

    def log(self, values: Mapping[str, Value], step: int, final: bool = False) -> None:
        if final:
            self.module.run.summary.update(dict(values))
        else:
            self.module.log(dict(values), step=step)

    def finish(self, failed: bool) -> None:
        self.module.finish(**({"exit_code": 1} if failed else {}))


class TensorBoard:
    """Event files in the folder tensorboard, which replace earlier ones. Text goes to the text tab."""

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = opening.folder / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(folder))
        about = {"group": opening.group, "tags": ", ".join(opening.tags)} | dict(opening.config)
        self.writer.add_text("config", "\n".join(f"    {name}={value}" for name, value in about.items()), 0)

    def log(self, values: Mapping[str, Value], step: int, final: bool = False) -> None:
        for name, value in values.items():
            (self.writer.add_text if isinstance(value, str) else self.writer.add_scalar)(name, value, step)

    def finish(self, failed: bool) -> None:
        self.writer.close()


def trackers(tracking: TrackingConfig) -> list[type[Wandb] | type[TensorBoard]]:
    """Return the trackers that are switched on."""
    wanted: list[tuple[bool, type[Wandb] | type[TensorBoard]]] = [
        (tracking.tensorboard, TensorBoard),
        (tracking.wandb, Wandb),
    ]
    return [kind for on, kind in wanted if on]


def fixed_id(folder: Path) -> str:
    """Return the W&B id of the run in a folder: a resumed run continues it. A damaged file gets a new id."""
    path = folder / ID_FILE
    with contextlib.suppress(FileNotFoundError, DamagedFileError):
        if re.fullmatch(r"[0-9a-f]{16}", text := read_text(path)):
            return text
    run_id = uuid.uuid4().hex[:16]
    files.write_text(path, run_id)
    return run_id


# -- the process that owns the trackers ---------------------------------------------------------------------------


@contextlib.contextmanager
def followed_by_trackers(folder: Path, tracking: TrackingConfig) -> Iterator[None]:
    """Forward a folder while the block runs, and up to FINISH_SECONDS longer. No process is left, and no error."""
    if not trackers(tracking):
        yield
        return
    with (folder / "track.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "study.trackers", str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=FINISH_SECONDS)  # closes the pipe
    finally:  # a tracker's child processes belong to its session and end with it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def track_verdict(study_dir: Path, tracking: TrackingConfig) -> None:
    """Send the verdicts of a finished study, in a limited time. A failure is printed and changes nothing."""
    try:
        with followed_by_trackers(study_dir, tracking):
            pass
    except OSError as error:
        print(f"the verdict was not tracked: {error.strerror or error}; {study_dir / 'report.json'} has it")


def sync_note(study_dir: Path, tracking: TrackingConfig) -> str:
    """Return the command that sends what W&B recorded offline; "" where it recorded nothing."""
    if not (tracking.wandb and tracking.wandb_mode == "offline" and any(study_dir.rglob("offline-run-2*"))):
        return ""
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    command = shlex.join([python, "-m", "wandb", "sync", "--include-offline"])
    folders = shlex.quote(str(study_dir))
    return f"to send the runs to W&B:\n  {command} {folders}/wandb/offline-* {folders}/runs/*/wandb/offline-*"


# -- in that process ----------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    """Forward a run or the verdicts of a study, and end with all child processes."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # not the cores of the run alone
    ended = threading.Event()
    threading.Thread(target=end_in_time, args=(ended,), daemon=True).start()
    verdicts = (folder / "runs").is_dir()
    opening = of_study(folder) if verdicts else of_run(folder)
    threads = [
        threading.Thread(target=send, args=(kind, opening, ended, verdicts), daemon=True)
        for kind in (trackers(opening.tracking) if opening else ())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stderr.flush()
    os.killpg(os.getpid(), signal.SIGKILL)


def end_in_time(ended: threading.Event) -> None:
    """Wait for the end of the worker, however it ends; kill this process and its children FINISH_SECONDS later."""
    sys.stdin.buffer.read()
    ended.set()
    time.sleep(FINISH_SECONDS)
    os.killpg(os.getpid(), signal.SIGKILL)


def send(
    kind: type[Wandb] | type[TensorBoard], opening: Opening, ended: threading.Event, verdicts: bool
) -> None:
    """Forward to one tracker. track.log gets its error."""
    try:
        tracker: Tracker = kind(opening)
        if verdicts:
            tracker.log(verdict_values(opening.folder), 0, final=True)
            tracker.finish(failed=False)
        else:
            forward(tracker, opening.folder, ended)
    except Exception:
        traceback.print_exc()


def of_run(run_dir: Path) -> Opening:
    """Return the description of a run."""
    plan = run_plan.load(run_dir / run_plan.FILE)
    tags = (plan.arm, f"seed {plan.seed}")
    return Opening(run_dir, plan.run, plan.study, tags, settings(run_dir / "config"), plan.settings.tracking)


def of_study(study_dir: Path) -> Opening | None:
    """Return the description of the verdicts; None where the report has none."""
    if not verdict_values(study_dir):
        return None
    tracking = TrackingConfig.from_symbols(read_symbols(study_dir / "config"))
    name, config = study_dir.absolute().name, settings(study_dir / "config")
    return Opening(study_dir, VERDICT, name, (VERDICT,), config, tracking)


def settings(config: Path) -> dict[str, str]:
    """Return the settings in a configuration without quotes."""
    try:
        entries = read_symbols(config).entries.values()
    except ConfigError:
        return {}
    return {f"CONFIG_{entry.name}": entry.value for entry in entries if entry.quoted or entry.value != "n"}


def forward(tracker: Tracker, run_dir: Path, ended: threading.Event) -> None:
    """Follow the run until its worker has ended."""
    reader, last = LogReader(run_dir / "metrics.jsonl"), False
    while not last:
        last = ended.wait(POLL_SECONDS)
        for text in reader.read():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged line
                line = json.loads(text)
                if values := metric_values(line):
                    tracker.log(values, int(line["iteration"]))
    try:
        record = run_record.load(run_dir)
    except run_record.RecordError:
        tracker.finish(failed=True)
        return
    if record.progress:
        tracker.log(final_values(record.to_json()), record.progress.iterations, final=True)
    tracker.finish(failed=record.status != "finished")


def metric_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line of metrics.jsonl under the names that trackers show.

    train/tokens is the axis of training and validation. validation/tokens, in the summary, is the number scored.
    """
    kind = line.get("event", "")
    if kind not in NAMES:
        return {}
    found = {f"{kind}/{key}": line[key] for key in NAMES[kind] if line.get(key) is not None}
    return found | {"train/tokens": line["tokens"]}


def final_values(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the final numbers of a record under the names that trackers show."""
    found: dict[str, float] = {}
    for group in ("validation", "hellaswag", "choice", "memory", "throughput"):
        for key, value in (record.get(group) or {}).items():
            if isinstance(value, (int, float)):
                found[f"{group}/{key}"] = value
    learned = (record.get("learned") or {}).get("alternation_probability") or []
    return found | {f"alternation/layer_{layer:02d}": p for layer, p in enumerate(learned)}


def verdict_values(study_dir: Path) -> dict[str, Value]:
    """Return verdict/ARM/{word,percent,low,high,p,seeds} of report.json; {} without a report.

    percent, low, high: change of perplexity in percent with its 95 % interval. p: after all corrections. A number that
    the report does not have is left out.
    """
    from referee.verdict.statistics import perplexity_percent  # loads scipy, which no worker needs

    try:
        verdicts: list[dict[str, Any]] = read_json(study_dir / "report.json")["verdicts"]
        found: dict[str, Value] = {}
        for one in verdicts:
            interval, start = one["test"]["difference"], f"{VERDICT}/{one['variant']}"
            numbers = {"percent": interval["mean"], "low": interval["low"], "high": interval["high"]}
            found[f"{start}/word"] = one["word"]
            found |= {f"{start}/{key}": perplexity_percent(x) for key, x in numbers.items() if x is not None}
            found |= {} if one["adjusted_p"] is None else {f"{start}/p": one["adjusted_p"]}
            found[f"{start}/seeds"] = interval["count"]
    except (FileNotFoundError, DamagedFileError, KeyError, TypeError):
        return {}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
