"""Create the record of a run before its first step, with the fingerprint that comparable runs share."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2 import tokenizer
from gpt2.initial_weights import standard_shapes, weights_digest
from runtime import provenance, resolved_target, run_record
from runtime.declared_symbols import numbers_of

if TYPE_CHECKING:
    from gpt2.training_step import Stepper
    from runtime.run_plan import RunPlan
    from runtime.settings import Config


# Raised by hand where a change of the code makes a configuration compute other numbers; `python -m
# scripts.dev.same_numbers` shows whether it does. It is part of the fingerprint: runs with another are not compared.
NUMBERS = 1


def initial_record(
    plan: RunPlan,
    resolved: resolved_target.ResolvedTarget,
    stepper: Stepper,
    data_fingerprint: str,
    windows: np.ndarray,
) -> run_record.RunRecord:
    """Return the record of a run before its first step, with the fingerprint that comparable runs share."""
    config, model = plan.settings, plan.settings.model
    fingerprint = run_record.Fingerprint(
        model=digest(numbers_of(config.model)),
        data=data_fingerprint,
        tokenizer=tokenizer.load(config.data.tokenizer).fingerprint,
        batch=digest([plan.batch.effective, plan.batch.block_size]),
        schedule=schedule_digest(config, plan.start.schedule if plan.start else None),
        initial_weights=weights_digest(
            stepper.model,
            stepper.seed,
            standard_shapes(model.layers, model.width, model.block_size, model.padded_vocabulary),
        ),
        validation=hashlib.sha256(np.ascontiguousarray(windows).data).hexdigest(),
        numbers=NUMBERS,
        numerics_fix=config.numerics_fix or None,
    )
    parameters = sum(p.numel() for p in stepper.model.parameters())
    return provenance.opening_record(plan, resolved, fingerprint, parameters)


def schedule_digest(config: Config, continues: str | None = None) -> str:
    """Digest the settings that decide the learning rate. continues: that digest of the runs that are continued."""
    return digest([numbers_of(config.optimizer), numbers_of(config.budget), *filter(None, [continues])])


def digest(value: Any) -> str:
    """Return the SHA-256 of plain data, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
