"""Evaluate a finished run on the texts that it lacks, on the device and in the number format of its training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpt2.artifacts import eval_sets
from gpt2.config.config import Config
from gpt2.data import tokenizer
from gpt2.eval.evaluator import Evaluator
from gpt2.eval.held_out import evaluate_sets
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.system.errors import UserError
from gpt2.system.signals import Stop
from gpt2.train.step import autocast
from study.attention.inspect import finished_record, load_run, require_last_weights
from study.eval_sets.later import evaluated_names


def evaluate_run(
    run_dir: Path, config: Config, resolved: ResolvedTarget, stop: Stop, announce: Callable[[str], None]
) -> None:
    """Add the missing texts of `config` to the run's eval_sets.json. run.json does not change.

    UserError without the final weights, on another device, and where a text cannot be read; the others are saved then.
    """
    record = finished_record(run_dir)
    trained, here = [
        f"{one[0]}, {one[1]}"
        for one in ((record.target.device, record.target.dtype), (resolved.device_name, resolved.dtype))
    ]
    if trained != here:
        raise UserError(
            f"{record.run} was trained on {trained} and this is {here}, whose rounding differs; fix: run `make` on the "
            "machine of training, or take the new text out of CONFIG_EVAL_SETS"
        )
    run = load_run(run_dir)
    require_last_weights(run, run_dir, record)
    present = evaluated_names(run_dir) or set()
    sets = tuple(one for one in config.evaluation.sets if one.name not in present)
    config = replace(config, evaluation=replace(config.evaluation, sets=sets))
    problems: list[str] = []
    run.model.to(resolved.device)
    evaluator = Evaluator(
        run.model,
        resolved.device,
        functools.partial(autocast, resolved.device, resolved.dtype),
        np.zeros((1, config.model.block_size + 1), dtype=np.uint16),  # no validation here
        tokenizer.load(config.data.tokenizer),
        config.evaluation,
        stop,
        announce,
    )
    found = evaluate_sets(config, evaluator, resolved, announce, problems.append)
    eval_sets.add(run_dir, record.run, record.progress.iterations, found)
    if problems:
        raise UserError("; ".join(problems))
