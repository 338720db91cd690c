"""Evaluate a trained run on platforms: the validation windows of training and HellaSwag, with its last weights."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from gpt2 import dataset, hellaswag, tokenizer
from gpt2.evaluator import Evaluator
from gpt2.hellaswag import Item, digest, load_items
from gpt2.initial_weights import state_digest
from gpt2.platforms import Platform, name_of_device, on_platform, parse_platform
from referee.verdict.rows import Row
from runtime import attention_kernels
from runtime.errors import UserError
from runtime.files import write_bytes
from runtime.gpu_specs import TargetError
from runtime.resolved_target import ResolvedTarget
from runtime.run_record import (
    EVALUATIONS,
    LaterEvaluation,
    RunRecord,
    platform_of,
    read_rows,
    write_evaluation,
)
from runtime.settings import Config
from runtime.signals import Stop
from study.evaluation.loaded_runs import TrainedRun, finished_record, load_run, require_last_weights
from study.evaluation.transfer_matrix import ACCURACY, ITEMS_TASK, folder_of, read, read_at_home
from study.runs import FinishedRecord, module


def find_items(record: RunRecord, config: Config) -> tuple[list[Item], str]:
    """Return the items that the run was scored on, from the configured file or a download; or why there are none.

    A run without HellaSwag has none. Items of another digest than the run's are not scored.
    """
    settings = config.evaluation
    if not settings.hellaswag:
        return [], ""
    if settings.hellaswag_file and not settings.hellaswag_file.is_file():  # a path of another machine
        settings = replace(settings, hellaswag_file=None)
    try:
        path = hellaswag.obtain(settings, config.data.directory, report=print)
        if isinstance(path, str):
            return [], path
        items = load_items(path, settings.hellaswag_limit)
    except UserError as error:
        return [], str(error)
    if record.hellaswag and record.hellaswag.items_sha256 not in (None, digest(items)):
        fix = f"fix: copy the items of the run to {config.data.directory / hellaswag.FILE_NAME}"
        return [], f"{path} has other items than the run was scored on; {fix}"
    return items, ""


WINDOWS = "windows.npy"  # the validation windows, beside the evaluations


@dataclass(frozen=True)
class EvaluatedPlatforms:
    """The results of a run. home: on the platform and machine of training, None if it was never evaluated there."""

    home: LaterEvaluation | None
    results: list[LaterEvaluation]
    notes: list[str]


def evaluate_run(run_dir: Path, names: Sequence[str], machine: str = "") -> EvaluatedPlatforms:
    """Evaluate a run on platforms; existing results of the same evaluation are kept.

    On the machine of training the home platform is evaluated as well. On another machine the names get @machine, by
    default from the name of its device; `machine` also selects that on the machine of training. UserError for an
    unfinished run, other data, or a result of another machine with the same name.
    """
    record = finished_record(run_dir, ("gpt2", "grpo"))
    if record.task == "grpo":
        found: EvaluatedPlatforms = module("study.evaluation.grpo_platforms").evaluate_run(
            run_dir, record, names, machine
        )
        return found
    run = load_run(run_dir)
    require_last_weights(run, run_dir, record)
    resolved, machine = device_of(run.config, record.target.device, machine)
    windows = _windows(run, run_dir, record.fingerprint.validation)
    items, absent = find_items(record, run.config)
    data = f"{ITEMS_TASK}@{digest(items)[:12]}" if items else ""
    run.model.to(resolved.device).eval()
    weights = state_digest(run.model)
    evaluation = _WindowsAndItems(run_dir, record, resolved, weights, data, absent, run, windows, items)
    notes = [f"{run.name}: {note}" for note in run.notes]
    return evaluation.on(names, machine, notes + ([f"HellaSwag is not scored: {absent}"] if absent else []))


def device_of(config: Config, trained_on: str, machine: str) -> tuple[ResolvedTarget, str]:
    """Return the device, and the machine's name: "" on the device of training where no name is given."""
    if not machine:
        try:
            own = attention_kernels.prepare_device(config.target, config.model)
            if own.device_name == trained_on:
                return own, ""
        except TargetError:  # the configured card is not here
            pass
    target = replace(config.target, name="auto", dtype="auto", scale_cpu=True)
    resolved = attention_kernels.prepare_device(target, config.model)
    return resolved, machine or name_of_device(resolved.device_name)


@dataclass(frozen=True)
class PlatformEvaluation(abc.ABC):
    """A run on a device. weights: their digest. data: of the items besides the verdict's, "" without; absent: why."""

    run_dir: Path
    record: FinishedRecord
    resolved: ResolvedTarget
    weights: str
    data: str
    absent: str

    def on(self, names: Sequence[str], machine: str, notes: list[str]) -> EvaluatedPlatforms:
        """Evaluate the run on the platforms; on the machine of training on the home platform, too."""
        home = platform_of(self.record.target.dtype)
        first = [] if machine else [home]
        platforms = [
            replace(parse_platform(name), machine=machine) for name in dict.fromkeys([*first, *names])
        ]
        found = [self.evaluate(platform) for platform in platforms]
        at_home = read_at_home(self.run_dir, self.record, home)
        same = at_home if at_home and at_home.about["weights"] == self.weights else None
        return EvaluatedPlatforms(same, found, notes)

    def evaluate(self, platform: Platform) -> LaterEvaluation:
        """Return the result on a platform, the existing one if it is of this evaluation."""
        label, device = platform.label, self.resolved.device_name
        about = {
            "weights": self.weights,
            "device": device,
            "torch": str(torch.__version__),
            "torchao": _torchao() if platform.bits else None,
        }
        existing = read(self.run_dir, self.record, label)
        if existing and platform.machine and existing.about["device"] != device:
            raise UserError(
                f"{existing.folder} is of {existing.about['device']}; this machine is {device}, so two machines have "
                f"the name {platform.machine}; fix: MACHINE=another name"
            )
        accuracy = existing and existing.row(ACCURACY)
        scored = accuracy.data if accuracy else ""
        # where the items are absent, a score of a machine that has them stays
        if existing and existing.about == about and (self.absent or scored == self.data):
            return existing
        row = read_rows(self.run_dir, self.record)[0]
        row = row.replace(platform=label, tokens=self.record.progress.tokens, items=0)
        folder = folder_of(self.run_dir, label)
        write_evaluation(folder, self.record, self.scored(platform, row), about)
        found = read(self.run_dir, self.record, label)
        assert found
        return found

    @abc.abstractmethod
    def scored(self, platform: Platform, row: Row) -> list[tuple[Row, Sequence[float]]]:
        """Return the rows with the values of their items. row: of the verdict's metric and data, without its value."""


@dataclass(frozen=True)
class _WindowsAndItems(PlatformEvaluation):
    """A GPT-2 on its validation windows and the items of HellaSwag."""

    run: TrainedRun
    windows: np.ndarray
    items: Sequence[Item]

    def scored(self, platform: Platform, row: Row) -> list[tuple[Row, Sequence[float]]]:
        device, config = self.resolved.device, self.run.config
        model, context = on_platform(self.run.model, platform, device, self.record.target.dtype)
        encoding = tokenizer.load(config.data.tokenizer)
        evaluator = Evaluator(
            model, device, context, self.windows, encoding, config.evaluation, Stop(), print
        )
        loss = evaluator.validate(0, 0.0)["loss"]
        if not math.isfinite(loss):
            raise UserError(
                f"{self.run.name} on {platform.label}: the loss is {loss}, so there is no result; fix: leave "
                f"{platform.name} out"
            )
        scored: list[tuple[Row, Sequence[float]]] = [(row.replace(value=loss), evaluator.window_losses)]
        if self.items:
            score = evaluator.score_items(self.items)
            one = row.replace(data=self.data, metric=ACCURACY, value=score.acc_norm)
            scored.append((one, score.correct_norm))
        return scored


def _torchao() -> str | None:
    try:
        return metadata.version("torchao")
    except metadata.PackageNotFoundError:
        return None


def _windows(run: TrainedRun, run_dir: Path, expected: str) -> np.ndarray:
    """Return the validation windows of the run, and save them, so that another machine needs no data.

    expected: their SHA-256. UserError if neither the saved windows nor the data of this machine have it.
    """
    path = run_dir / EVALUATIONS / WINDOWS
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
            f"machine of training, and copy {EVALUATIONS}/{WINDOWS} of the run from there"
        )
    content = io.BytesIO()
    np.save(content, windows)
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, content.getvalue())
    return windows


def _sha256(windows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(windows).data).hexdigest()
