"""Send to the trackers what they do not have of a study: offline recordings of W&B, and runs whose logger failed.

A run with the note of its digest (gpt2.artifacts.tracker_clients) is not sent twice. A W&B folder is sent by `wandb
sync`. Everything else is replayed from metrics.jsonl and run.json under the run's fixed id.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.artifacts import experiment_loggers, run_record
from gpt2.artifacts.experiment_loggers import ExperimentLoggers, wanted_loggers
from gpt2.artifacts.tracker_clients import offline_folders, tracked, write_tracked
from gpt2.config.config import TrackingConfig
from gpt2.system.errors import UserError
from study.tracking import verdict_run

SEND_SECONDS = 300.0  # limit for one run
REACH_SECONDS = 5.0  # limit for the first answer of W&B
NOTHING, SENT, KNOWN, REFUSED = "nothing to send", "sent", "already sent", "not sent"


def too_slow(logger: str, name: str) -> UserError:
    """Return the error of a tracker that took longer than SEND_SECONDS for one run."""
    return UserError(
        f"{logger} took longer than {SEND_SECONDS:.0f} s for {name}; the rest was not sent; fix: make sync (it "
        "continues)"
    )


@dataclass(frozen=True)
class SyncItem:
    """A run, or the verdicts of a study. digest: of its content; reason: of an item that cannot be sent, else ""."""

    folder: Path
    name: str
    module: str
    digest: str
    reason: str = ""


@dataclass(frozen=True)
class SyncOutcome:
    """One line of `make sync`."""

    logger: str
    name: str
    state: str
    detail: str = ""

    @property
    def text(self) -> str:
        return f"{self.logger:<12} {self.name:<20} {self.state}" + (f": {self.detail}" if self.detail else "")


def sync_study(
    study_dir: Path, tracking: TrackingConfig, say: Callable[[SyncOutcome], None]
) -> list[SyncOutcome]:
    """Send the runs and verdicts of a study to each tracker of the configuration, W&B last. Return the outcomes.

    UserError: no tracker is configured or installed, W&B cannot be reached, or a tracker is too slow.
    """
    loggers = [name for name, _, _ in wanted_loggers(tracking)]
    if not loggers:
        raise UserError(
            "no tracker is configured; fix: make menuconfig (Tracking: W&B, Trackio or TensorBoard), then make sync"
        )
    for name in loggers:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is not installed; fix: {sys.executable} -m pip install {name}")
    found, everything = [], items(study_dir)
    for name in loggers:
        reached = name != "wandb"
        for item in everything:
            outcome = _known(item, name)
            if outcome is None:
                if not reached:
                    require_wandb()
                    reached = True
                outcome = _send(item, name, tracking)
            found.append(outcome)
            say(outcome)
    return found


def items(study_dir: Path) -> list[SyncItem]:
    """Return the runs of a study in the order of their names, then its verdicts."""
    found = [_run_item(path.parent) for path in sorted((study_dir / "runs").glob("*/run.json"))]
    digest = verdict_run.recorded_digest(study_dir)
    reason = "" if digest else "the report has no verdict"
    return [*found, SyncItem(study_dir, verdict_run.NAME, verdict_run.MODULE, digest, reason)]


def _run_item(folder: Path) -> SyncItem:
    module, digest, reason = experiment_loggers.MODULE, "", ""
    try:
        record = run_record.load(folder)
    except run_record.RecordError as error:
        reason = f"{error}"
    else:
        digest = experiment_loggers.recorded_digest(folder, record)
        if record.status == "running":
            reason = "the run has not ended"
        elif not (folder / "metrics.jsonl").exists():
            reason = "it has no metrics.jsonl"
    return SyncItem(folder, folder.name, module, digest, reason)


def _known(item: SyncItem, logger: str) -> SyncOutcome | None:
    """Return the outcome of an item that needs no tracker: it has been sent, or cannot be; else None."""
    if item.reason:
        return SyncOutcome(logger, item.name, NOTHING, item.reason)
    note = tracked(item.folder, logger)
    kept = logger != "tensorboard" or any((item.folder / "tensorboard").glob("events.out.tfevents.*"))
    return (
        SyncOutcome(logger, item.name, KNOWN) if note.digest == item.digest and note.sent and kept else None
    )


def _send(item: SyncItem, logger: str, tracking: TrackingConfig) -> SyncOutcome:
    """Send an item by `wandb sync` where W&B recorded all of it offline, else by replaying it."""
    note = tracked(item.folder, logger)
    folders = offline_folders(item.folder)
    if logger == "wandb" and note.digest == item.digest and folders:
        if not any(folders[-1].glob("*.wandb.synced")):
            status, last = _wandb_sync(folders[-1], item.name)
            if status:
                return SyncOutcome(logger, item.name, REFUSED, last)
        write_tracked(item.folder, logger, replace(note, sent=True))
        return SyncOutcome(logger, item.name, SENT, "recorded offline")
    only = TrackingConfig(
        logger == "wandb", "online", tracking.wandb_project, logger == "trackio", logger == "tensorboard"
    )
    log = item.folder / "track.log"
    before = log.stat().st_size if log.exists() else 0
    loggers = ExperimentLoggers(item.folder, only, item.module)
    loggers.finish(SEND_SECONDS)
    if loggers.processes[0].returncode == -signal.SIGKILL:
        raise too_slow(logger, item.name)
    note = tracked(item.folder, logger)
    if note.sent and note.digest == item.digest:
        return SyncOutcome(logger, item.name, SENT, "replayed from the records")
    with log.open(errors="replace") as file:
        file.seek(before)
        lines = file.read().split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote no reason")
    return SyncOutcome(logger, item.name, REFUSED, f"{last[:160]} (see {log})")


def _wandb_sync(folder: Path, name: str) -> tuple[int, str]:
    """Send one folder of W&B; return the exit status and the last line."""
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SEND_SECONDS)
    except subprocess.TimeoutExpired:
        raise too_slow("wandb", name) from None
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, lines[-1][:160] if lines else f"exit status {done.returncode}"


def require_wandb() -> None:
    """Raise UserError if the server of W&B does not answer within REACH_SECONDS."""
    os.environ.setdefault("WANDB_SILENT", "true")
    url = str(importlib.import_module("wandb").setup().settings.base_url)
    try:
        urllib.request.urlopen(url, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"W&B at {url} cannot be reached ({reason}); nothing was sent there; fix: make sync with a network"
        ) from error
