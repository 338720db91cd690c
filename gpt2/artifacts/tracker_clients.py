"""One interface to Weights & Biases and TensorBoard: numbers at steps and a summary, under the same names."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpt2.system import files
from gpt2.system.read_files import DamagedFileError, read_text

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
