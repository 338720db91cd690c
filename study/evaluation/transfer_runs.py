"""Evaluate a trained run on platforms: the validation windows of training and HellaSwag, with its last weights."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from gpt2 import dataset, hellaswag, tokenizer
from gpt2.evaluator import Evaluator
from gpt2.hellaswag import load_items
from gpt2.initial_weights import state_digest
from gpt2.platforms import Platform, name_of_device, on_platform, parse_platform
from runtime import attention_kernels, records
from runtime.errors import UserError
from runtime.files import DamagedFileError, write_bytes
from runtime.gpu_specs import TargetError
from runtime.resolved_target import ResolvedTarget
from runtime.run_record import RunRecord
from runtime.settings import Config
from runtime.signals import Stop
from study.evaluation.loaded_runs import TrainedRun, finished_record, load_run, require_last_weights
from study.evaluation.transfer_matrix import (
    FOLDER,
    ItemResults,
    PlatformRecord,
    home_platform,
    path_of,
    read,
    read_at_home,
    write,
)
from study.hellaswag_scores import ItemsFile


@dataclass(frozen=True)
class ItemSource:
    """path: of the items, None without. sha256: of the scored items, "" without. absent: why there are none."""

    path: Path | None = None
    sha256: str = ""
    absent: str = ""


def find_items(run_dir: Path, record: RunRecord, config: Config) -> ItemSource:
    """Find the items that the run was scored on: its study's file, the configured one, or a download.

    A run without HellaSwag has none. Items of another digest than the run's are not scored.
    """
    settings = config.evaluation
    scored = record.hellaswag.items_sha256 if record.hellaswag else None
    if not settings.hellaswag:
        return ItemSource()
    path = _of_study(run_dir)
    if path is None:
        if settings.hellaswag_file and not settings.hellaswag_file.is_file():  # a path of another machine
            settings = replace(settings, hellaswag_file=None)
        found = hellaswag.obtain(settings, config.data.directory, report=print)
        if isinstance(found, str):
            return ItemSource(absent=found)
        path = found
    try:
        sha256 = hellaswag.digest(hellaswag.load_items(path, settings.hellaswag_limit))
    except UserError as error:
        return ItemSource(absent=str(error))
    if scored and sha256 != scored:
        fix = f"fix: copy the items of the run to {config.data.directory / hellaswag.FILE_NAME}"
        return ItemSource(absent=f"{path} has other items than the run was scored on; {fix}")
    return ItemSource(path, sha256)


def _of_study(run_dir: Path) -> Path | None:
    """Return the file of items that the run's study names, if this machine has it."""
    with contextlib.suppress(FileNotFoundError, DamagedFileError):
        named = records.read(ItemsFile, run_dir.resolve().parents[1] / "hellaswag.json").path
        if named and Path(named).is_file():
            return Path(named)
    return None


def compact(score: hellaswag.HellaSwag) -> ItemResults:
    """Return the results with one character an item."""
    right = "".join(str(int(one)) for one in score.correct_norm)
    return ItemResults(score.acc_norm, score.items_sha256, "".join(map(str, score.choices_norm)), right)


WINDOWS = "windows.npy"  # the validation windows, beside the records


@dataclass(frozen=True)
class EvaluatedPlatforms:
    """The records of a run. home: on the platform and machine of training, None if it was never evaluated there."""

    home: PlatformRecord | None
    records: list[PlatformRecord]
    notes: list[str]


def evaluate_run(run_dir: Path, names: Sequence[str], machine: str = "") -> EvaluatedPlatforms:
    """Evaluate a run on platforms; existing records of the same evaluation are kept.

    On the machine of training the home platform is evaluated as well. On another machine the names get @machine, by
    default from the name of its device; `machine` also selects that on the machine of training. UserError for an
    unfinished run, other data, or a record of another machine with the same name.
    """
    record = finished_record(run_dir)
    run = load_run(run_dir)
    require_last_weights(run, run_dir, record)
    resolved, machine = _device(run, record.target.device, machine)
    home = home_platform(record)
    first = [] if machine else [home]
    platforms = [replace(parse_platform(name), machine=machine) for name in dict.fromkeys([*first, *names])]
    windows = _windows(run, run_dir, record.fingerprint.validation)
    items = find_items(run_dir, record, run.config)
    weights = state_digest(run.model)
    run.model.to(resolved.device).eval()
    evaluation = _Evaluation(run, run_dir, resolved, windows, items, weights, record.target.dtype)
    found = [evaluation.evaluate(platform) for platform in platforms]
    notes = [f"{run.name}: {note}" for note in run.notes]
    notes += [f"HellaSwag is not scored: {items.absent}"] if items.absent else []
    at_home = read_at_home(run_dir, record, home)
    same = at_home if at_home and at_home.weights == weights else None
    return EvaluatedPlatforms(same, found, notes)


def _device(run: TrainedRun, trained_on: str, machine: str) -> tuple[ResolvedTarget, str]:
    """Return the device, and the machine's name: "" on the device of training where no name is given."""
    if not machine:
        try:
            own = attention_kernels.prepare_device(run.config.target, run.config.model)
            if own.device_name == trained_on:
                return own, ""
        except TargetError:  # the configured card is not here
            pass
    target = replace(run.config.target, name="auto", dtype="auto", scale_cpu=True)
    resolved = attention_kernels.prepare_device(target, run.config.model)
    return resolved, machine or name_of_device(resolved.device_name)


@dataclass(frozen=True)
class _Evaluation:
    """A run on a device. weights: their digest. trained_in: the number format of training."""

    run: TrainedRun
    run_dir: Path
    resolved: ResolvedTarget
    windows: np.ndarray
    items: ItemSource
    weights: str
    trained_in: str

    def evaluate(self, platform: Platform) -> PlatformRecord:
        """Return the record of a platform, the existing one if it is of this evaluation."""
        text = _sha256(self.windows)
        torchao = _torchao() if platform.bits else None
        existing = read(self.run_dir, platform.label)
        if existing and platform.machine and existing.device != self.resolved.device_name:
            raise UserError(
                f"{path_of(self.run_dir, platform.label)} is of {existing.device}; this machine is "
                f"{self.resolved.device_name}, so two machines have the name {platform.machine}; "
                "fix: MACHINE=another name"
            )
        scored = existing.hellaswag.items_sha256 if existing and existing.hellaswag else ""
        items = scored if self.items.absent else self.items.sha256  # scored where the items were present
        wanted = (self.weights, text, self.resolved.device_name, torch.__version__, torchao, items)
        if existing and wanted == (
            existing.weights,
            existing.windows,
            existing.device,
            existing.torch,
            existing.torchao,
            scored,
        ):
            return existing
        began = time.monotonic()
        model, context = on_platform(self.run.model, platform, self.resolved.device, self.trained_in)
        config = self.run.config
        encoding = tokenizer.load(config.data.tokenizer)
        evaluator = Evaluator(
            model, self.resolved.device, context, self.windows, encoding, config.evaluation, Stop(), print
        )
        loss = evaluator.validate(0, 0.0)["loss"]
        if not math.isfinite(loss):
            raise UserError(
                f"{self.run.name} on {platform.label}: the loss is {loss}, so there is no result; fix: leave "
                f"{platform.name} out"
            )
        path, limit = self.items.path, evaluator.settings.hellaswag_limit
        record = PlatformRecord(
            run=self.run.name,
            platform=platform.label,
            weights=self.weights,
            windows=text,
            device=self.resolved.device_name,
            torch=torch.__version__,
            loss=loss,
            tokens=evaluator.tokens,
            window_losses=tuple(evaluator.window_losses),
            seconds=round(time.monotonic() - began, 3),
            torchao=torchao,
            hellaswag=compact(evaluator.score_items(load_items(path, limit))) if path else None,
        )
        write(self.run_dir, record)
        return record


def _torchao() -> str | None:
    try:
        return metadata.version("torchao")
    except metadata.PackageNotFoundError:
        return None


def _windows(run: TrainedRun, run_dir: Path, expected: str) -> np.ndarray:
    """Return the validation windows of the run, and save them, so that another machine needs no data.

    expected: their SHA-256. UserError if neither the saved windows nor the data of this machine have it.
    """
    path = run_dir / FOLDER / WINDOWS
    with contextlib.suppress(OSError, ValueError, EOFError):
        saved: np.ndarray = np.load(path, allow_pickle=False)
        if _sha256(saved) == expected:
            return saved
    corpus = dataset.open_corpus(dataset.prepare(run.config.data, report=print))
    windows = dataset.validation_windows(
        corpus.validation, run.config.model.block_size, run.config.evaluation.tokens
    )
    if _sha256(windows) != expected:
        raise UserError(
            f"{run.name} was validated on other windows than the data on this machine give; fix: make evaluate on the "
            f"machine of training, and copy {FOLDER}/{WINDOWS} of the run from there"
        )
    content = io.BytesIO()
    np.save(content, windows)
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, content.getvalue())
    return windows


def _sha256(windows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(windows).data).hexdigest()
