"""Check that every arm of a study starts as the imported model, and measure the differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpt2.config.config import Config
from gpt2.data import dataset
from gpt2.eval.validation import evaluating
from gpt2.interop.pretrained import Pretrained, find_pretrained
from gpt2.interop.start import StartError, refuse_changed, standard_weights, start_from
from gpt2.model.init import initialise
from gpt2.model.transformer import GPT2
from gpt2.system.errors import UserError
from gpt2.train.step import build_model
from ra.variants import Variant
from study.records import plan_file
from study.records.plan_file import InitialWeights, Plan, StartDifference
from study.records.present import read_records

WINDOWS = 2  # of validation, on which the arms are compared
ROUNDING = 1e-4  # of the largest logit; float32 rounding of two orders of one sum is below 1e-5


def check_weights(config: Config, study_dir: Path) -> Pretrained:
    """Find the weights of CONFIG_INIT_FROM. UserError where they do not fit .config, or changed since a run."""
    found = find_pretrained(config.init_from)
    found.check(config.model)
    for sha256 in _recorded(study_dir):
        refuse_changed(found, sha256)
    for note in found.notes:
        print(note)
    return found


def _recorded(study_dir: Path) -> Iterator[str]:
    """Return the digests of the weights of the plan and of the runs."""
    plan = plan_file.read_valid(study_dir)
    if plan and plan.initial_weights:
        yield plan.initial_weights.sha256
    for record in read_records(study_dir).values():
        if record.started_from:
            yield record.started_from.sha256


def measured(
    study_dir: Path, plan: Plan, weights: Pretrained | None, config: Config, variants: Mapping[str, Variant]
) -> Plan:
    """Return the plan with the start of every arm. UserError for an arm that starts as another function.

    weights: None if no run needs them.
    """
    known = plan.initial_weights
    missing = {name: arm for name, arm in variants.items() if known is None or name not in known.arms}
    if weights is None or not missing:
        return plan
    print(f"comparing {len(missing)} arms with {weights.source} on {WINDOWS} validation windows", flush=True)
    ids_BT = _validation_ids(config)
    sizes = (config.model.layers, config.model.width, config.model.block_size, config.model.padded_vocabulary)
    state = standard_weights(weights, *sizes)
    base = build_model(dataclasses.replace(config.model, dropout=0.0))
    start_from(base, state)
    logits, losses = _evaluate(base, ids_BT)
    loss = float(losses.mean())
    del base
    arms = dict(known.arms) if known else {}
    for name, arm in missing.items():
        arms[name] = _compare(name, arm, state, ids_BT, logits, losses, plan.equivalence_margin)
    tokens = ids_BT.shape[0] * (ids_BT.shape[1] - 1)
    initial = InitialWeights(config.init_from, weights.sha256, tokens, loss, arms)
    return plan_file.write(study_dir, dataclasses.replace(plan, initial_weights=initial))


def _validation_ids(config: Config) -> Tensor:
    length = config.model.block_size
    corpus = dataset.open_corpus(dataset.prepare(config.data, report=lambda text: None))
    windows = dataset.validation_windows(corpus.validation, length, config.evaluation.tokens)
    return torch.from_numpy(windows[:WINDOWS].astype("int64"))


def _compare(
    name: str,
    arm: Variant,
    state: Mapping[str, Tensor],
    ids_BT: Tensor,
    logits: Tensor,
    losses: Tensor,
    margin: float,
) -> StartDifference:
    model = build_model(arm.model, arm.parts)
    initialise(model, 0)
    another = "fix: leave it out of CONFIG_VARIANTS, or train it in a study without CONFIG_INIT_FROM"
    try:
        start_from(model, state)
    except StartError as error:
        raise UserError(f"{name} cannot hold the imported weights: {error}; {another}") from error
    found, other = _evaluate(model, ids_BT)
    changes = other - losses
    difference = StartDifference(
        float((found - logits).abs().max() / logits.abs().max()),
        float(changes.mean()),
        float(changes.abs().mean()),
    )
    declared = any(hasattr(module, "start_at_identity") for module in model.modules())
    if not declared and not difference.logits <= ROUNDING:
        raise UserError(
            f"{name} is another function than the imported model before its first step: logits differ by "
            f"{difference.logits:.1e} of the largest, and no module of it has start_at_identity(); {another}"
        )
    if not abs(difference.loss) <= margin or not math.isfinite(difference.logits):
        raise UserError(
            f"{name} starts {difference.loss:+.2g} nats from the imported model, more than the equivalence margin of "
            f"{margin:.2g}; fix: a smaller CONFIG_ALTERNATION_INIT for RALEARN, or CONFIG_VARIANTS without it"
        )
    return difference


def _evaluate(model: GPT2, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (B, T-1, V), and the loss of each token in nats as float64. Computed in float32 on the CPU."""
    with evaluating(model):
        logits: Tensor = model(ids_BT[:, :-1])
    losses = cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
    return logits, losses.double()
