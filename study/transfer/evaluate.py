"""Evaluate a trained run on platforms: the validation windows of training, with the weights of its last checkpoint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from aqn.apply import on_platform
from aqn.platforms import Platform, parse_platform
from gpt2.artifacts import run_record
from gpt2.data import dataset
from gpt2.eval.validation import EVALUATION_TOKENS, perplexity
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.model.transformer import GPT2
from gpt2.system.errors import UserError
from study.attention.inspect import TrainedRun, load_run
from study.transfer.records import HOMES, PlatformRecord, read, write


class EvaluateError(UserError, RuntimeError):
    """A run cannot be evaluated on this machine."""


def evaluate_run(run_dir: Path, names: Sequence[str]) -> list[PlatformRecord]:
    """Evaluate a run on its home platform and the named ones; existing records of the same evaluation are kept.

    The first record is that of the home platform, the number format of training. EvaluateError for other data or an
    unfinished run.
    """
    record = run_record.load(run_dir)
    if record.status != "finished" or record.target is None or record.fingerprint is None:
        raise EvaluateError(f"{run_dir} is {record.status}; fix: run `make` until the run is finished")
    home = HOMES.get(record.target.dtype, "fp32")
    platforms = [parse_platform(name) for name in dict.fromkeys([home, *names])]
    run = load_run(run_dir)
    if record.progress and run.iteration != record.progress.iterations:
        raise EvaluateError(
            f"{run_dir}/checkpoint has the weights of iteration {run.iteration}; the run finished at "
            f"{record.progress.iterations}; fix: copy the checkpoint of the finished run"
        )
    resolved = attention_kernels.prepare_device(run.config.target, run.config.model)
    windows = _windows(run, record.fingerprint.validation)
    weights = _digest(run.model)
    run.model.to(resolved.device).eval()
    return [
        _evaluate(run, run_dir, platform, resolved, windows, weights, record.target.dtype)
        for platform in platforms
    ]


def _evaluate(
    run: TrainedRun,
    run_dir: Path,
    platform: Platform,
    resolved: ResolvedTarget,
    windows: np.ndarray,
    weights: str,
    home: str,
) -> PlatformRecord:
    text = hashlib.sha256(np.ascontiguousarray(windows).data).hexdigest()
    parts = [weights, text, platform.name, home, resolved.device_name, torch.__version__]
    identity = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    existing = read(run_dir, platform.name)
    if existing and existing.identity == identity:
        return existing
    began = time.monotonic()
    model, context = on_platform(run.model, platform, resolved.device, home)
    batch = max(1, EVALUATION_TOKENS[resolved.device_type] // run.config.model.block_size)
    found = perplexity(model, windows, batch, resolved.device, context)
    record = PlatformRecord(
        run=run.name,
        platform=platform.name,
        identity=identity,
        weights=weights,
        windows=text,
        device=resolved.device_name,
        torch=torch.__version__,
        loss=found.loss,
        tokens=found.tokens,
        window_losses=tuple(found.window_losses),
        seconds=round(time.monotonic() - began, 3),
    )
    write(run_dir, record)
    return record


def _windows(run: TrainedRun, expected: str) -> np.ndarray:
    """Return the validation windows of the run. EvaluateError if the prepared data give others."""
    corpus = dataset.open_corpus(dataset.prepare(run.config.data, report=print))
    windows = dataset.validation_windows(
        corpus.validation, run.config.model.block_size, run.config.evaluation.tokens
    )
    if hashlib.sha256(np.ascontiguousarray(windows).data).hexdigest() != expected:
        raise EvaluateError(
            f"{run.name} was validated on other windows than the data on this machine give; fix: prepare the data of "
            "the run (make data with its configuration)"
        )
    return windows


def _digest(model: GPT2) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
