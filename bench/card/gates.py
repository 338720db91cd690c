"""Check the gradients of RALEARN's gates against float64. They are sums with cancellation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.card.checks import Card, Check, judge, not_run
from bench.case_step import model_and_attention, random_batch
from bench.cases import Sizes
from bench.workers import BenchError, Worker
from gpt2.hardware import attention_kernels
from gpt2.hardware.resolve import ResolvedTarget
from gpt2.model.init import initialise
from gpt2.model.loss import linear_cross_entropy
from gpt2.train.step import autocast, build_model

SHAPES = {False: Sizes("124m-t512", 12, 12, 768, 512), True: Sizes("4x128-t128", 4, 4, 128, 128)}
SEQUENCES = 2
EXACT = "float64"
# Largest error of the vector of all layers' gate gradients, relative to its length.
LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "bfloat16 compiled": 0.1}
LIMIT_SECONDS = 300.0


def gate_checks(card: Card) -> Iterator[Check]:
    """Compare each precision with float64."""
    with Worker("gate gradients") as worker:
        arguments = (card.resolved, SHAPES[card.on_cpu])
        exact = worker.call(gate_gradients, *arguments, EXACT, limit_seconds=LIMIT_SECONDS)
        for precision, limit in LIMITS.items():
            name, expected = f"gate gradients: {precision}", f"within {limit:g} of float64"
            if precision.endswith("compiled") and card.on_cpu:
                yield not_run(name, expected, "a study on a CPU does not compile")
                continue
            if precision.startswith("bfloat16") and card.resolved.dtype == "float32" and not card.on_cpu:
                yield not_run(name, expected, f"{card.resolved.device_name} has no bfloat16")
                continue
            try:
                found = worker.call(gate_gradients, *arguments, precision, limit_seconds=LIMIT_SECONDS)
            except BenchError as error:
                yield judge(name, expected, f"{error}", False)
                continue
            found_error = distance(found, exact)
            yield judge(name, expected, f"{found_error:.1e} over {len(exact)} layers", found_error <= limit)


def distance(found: list[float], exact: list[float]) -> float:
    """Return the Euclidean distance, relative to the length of `exact`."""
    one, other = torch.tensor([found, exact], dtype=torch.float64)
    return float((one - other).norm() / other.norm())


def gate_gradients(resolved: ResolvedTarget, sizes: Sizes, precision: str) -> list[float]:
    """Return the gradient of each layer's gate for one micro-batch. float64 uses the definition of attention."""
    dtype = precision.split()[0]
    config, attention = model_and_attention(sizes, "RALEARN")
    model = build_model(config, attention)
    initialise(model, seed=0)
    model.to(resolved.device, torch.float64 if precision == EXACT else None)
    hidden = torch.compile(model.hidden) if precision.endswith("compiled") else model.hidden
    ids_BT = random_batch(sizes, SEQUENCES, resolved.device)
    kernels: AbstractContextManager[Any] = attention_kernels.attention_context(resolved)
    casts: AbstractContextManager[Any] = contextlib.nullcontext()
    if precision == EXACT:
        kernels = sdpa_kernel(SDPBackend.MATH)
    else:
        casts = autocast(resolved.device, dtype)
    with kernels:
        with casts:
            x_BTC = hidden(ids_BT[:, :-1].contiguous())
            loss = linear_cross_entropy(x_BTC, model.head, ids_BT[:, 1:], model.vocabulary)
        blocks: list[Any] = list(model.blocks)
        gradients = torch.autograd.grad(loss, [block.attention.alternation_logit for block in blocks])
    return [float(gradient) for gradient in gradients]
