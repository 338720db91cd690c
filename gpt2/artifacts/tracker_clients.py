"""One interface to Weights & Biases, trackio and TensorBoard, and the note of what each of them has.

A client takes numbers at steps and a summary at the end, under the same names in all three. tracked_LOGGER.json beside
the metrics holds the run's fixed id and the digest of what the tracker has, so that nothing is sent twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gpt2.artifacts.typed_json import InvalidJsonError, JsonObject, parse
from gpt2.system import files
from gpt2.system.read_files import DamagedFileError, read_json

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
    """The description of a run. folder: of the run; run_id: fixed; mode: of W&B, online or offline."""

    folder: Path
    run_id: str
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
            id=opening.run_id,
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


class TrackioClient:
    """A trackio run. trackio has neither ids nor tags, so both are in the config; a run of the same id is replaced."""

    def __init__(self, opening: Opening) -> None:
        self.module: Any = importlib.import_module("trackio")
        with contextlib.suppress(ValueError):  # no such project yet
            for run in self.module.Api().runs(opening.project):
                if (run.config or {}).get("run_id") == opening.run_id:
                    run.delete()
        about = {"run_id": opening.run_id, "tags": list(opening.tags), "job_type": opening.job_type}
        self.module.init(
            project=opening.project,
            name=opening.name,
            group=opening.group,
            config={**opening.config, **about},
        )

    def log(self, values: Mapping[str, Value], step: int) -> None:
        self.module.log(dict(values), step=step)

    summarize = log

    def finish(self, failed: bool) -> None:
        self.module.finish()


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
    "trackio": TrackioClient,
    "tensorboard": TensorBoardClient,
}


def connect(logger: str, opening: Opening) -> Client:
    """Open a run of a tracker."""
    return CLIENTS[logger](opening)


# -- what a tracker has --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tracked(JsonObject):
    """A run at a tracker. digest: of the complete run, else ""; sent: False while it is only on this disk."""

    run_id: str
    digest: str = ""
    sent: bool = False


def _path(folder: Path, logger: str) -> Path:
    return folder / f"tracked_{logger}.json"


def tracked(folder: Path, logger: str) -> Tracked:
    """Read the note of a run; a run without one gets a random id. A damaged note counts as none."""
    with contextlib.suppress(FileNotFoundError, DamagedFileError, InvalidJsonError):
        return parse(Tracked, read_json(_path(folder, logger)), "tracked")
    return Tracked(uuid.uuid4().hex[:16])


def write_tracked(folder: Path, logger: str, note: Tracked) -> None:
    """Write the note of a run."""
    files.write_json(_path(folder, logger), note.to_json())


def opened(folder: Path, logger: str) -> Tracked:
    """Note that a tracker starts with this run, and return the note."""
    note = replace(tracked(folder, logger), digest="", sent=False)
    write_tracked(folder, logger, note)
    return note


def message_digest(messages: Iterable[tuple[Mapping[str, Value], int]]) -> str:
    """Return the SHA-256 of values and steps."""
    digest = hashlib.sha256()
    for values, step in messages:
        digest.update(json.dumps([values, step], sort_keys=True).encode())
    return digest.hexdigest()


def offline_folders(folder: Path) -> list[Path]:
    """Return the folders that W&B wrote, the newest last, without its link latest-run."""
    return sorted((folder / "wandb").glob("*run-2*"))
