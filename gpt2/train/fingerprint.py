"""The record of a run before its first step, with the fingerprint that comparable runs share."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2.artifacts import provenance, run_record
from gpt2.artifacts.provenance import revision
from gpt2.data import tokenizer
from gpt2.hardware import resolve
from gpt2.model.init import weights_digest

if TYPE_CHECKING:
    from gpt2.config.config import Config
    from gpt2.train.run_plan import RunPlan
    from gpt2.train.step import Stepper


def initial_record(
    plan: RunPlan,
    config: Config,
    resolved: resolve.ResolvedTarget,
    stepper: Stepper,
    data_fingerprint: str,
    windows: np.ndarray,
) -> dict[str, Any]:
    """The record of a run before its first step: who it is, and what it must share with others to be compared."""
    code = revision()
    return run_record.blank(plan.run, plan.variant, plan.seed) | {
        "commit": code.commit,
        "dirty": code.dirty,
        "config_sha256": config.sha256,
        "fingerprint": {
            "model": digest(dataclasses.asdict(config.model)),
            "data": data_fingerprint,
            "tokenizer": tokenizer.fingerprint(),
            "batch": digest([plan.batch.effective, plan.batch.block_size]),
            "schedule": schedule_digest(config, plan.extended),
            "initial_weights": weights_digest(stepper.model, stepper.seed),
            "validation": hashlib.sha256(np.ascontiguousarray(windows).data).hexdigest(),
        },
        "target": resolve.target_record(resolved),
        "environment": provenance.environment_record(),
        "batch": dataclasses.asdict(plan.batch),
        "parameters": sum(p.numel() for p in stepper.model.parameters()),
    }


def schedule_digest(config: Config, extended: float) -> str:
    """What decides a learning rate. Of runs that were extended by one factor it is one, and of no others."""
    settings = dataclasses.asdict(config.optimizer)
    if settings["schedule"] == "cosine":  # as it was hashed when there was no other
        del settings["schedule"], settings["decay_fraction"]
    longer = [] if extended == 1 else [{"extended": extended}]
    return digest([settings, dataclasses.asdict(config.budget), *longer])


def digest(value: Any) -> str:
    """SHA-256 of plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
