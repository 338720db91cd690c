"""Pairs that differ by correct kernels, or in nothing: a verdict `diverges` is a false alarm."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from referee.numerics.repeat.conditions import threads
from tests.referee.numerics.corpus import changes
from tests.referee.numerics.corpus.cases import BOTH, Case, Side
from tests.referee.numerics.corpus.faults import ADAMW
from tests.referee.numerics.corpus.models import TRANSFORMERS, MicroBatches, adamw


def no_mkldnn() -> AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


def math_attention() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextlib.contextmanager
def every_kernel() -> Iterator[None]:
    with threads(2), no_mkldnn(), math_attention():
        yield


@contextlib.contextmanager
def autocast_without_mkldnn() -> Iterator[None]:
    with autocast(), no_mkldnn():
        yield


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def pair(
    name: str,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    base: Side | None = None,
    verdict: str = "rounding",
    kinds: tuple[str, ...] = BOTH,
    **target: Any,
) -> Case:
    """Return a pair of a side (`base`) and the side with other settings."""
    golden = base or Side()
    changed = dataclasses.replace(golden, around=around, **target)
    return Case(name, "", changed, golden, verdict=verdict, kinds=kinds)


def _pairs() -> Iterator[Case]:
    yield pair("the same settings", verdict="equal")
    yield pair("another process", other_process=True, verdict="equal")
    yield pair("two threads", lambda: threads(2))
    yield pair("oneDNN off", no_mkldnn)
    yield pair("another attention kernel", math_attention)
    yield pair("threads, oneDNN and attention kernel", every_kernel)
    yield pair("autocast, oneDNN off", autocast_without_mkldnn, Side(around=autocast))
    yield pair(
        "eager attention",
        change=lambda parts: setattr(parts.model.config, "_attn_implementation", "eager"),
        kinds=(TRANSFORMERS,),
    )
    yield pair("modules against modules and functions", settings={"level": "L0"}, verdict="equal")
    yield pair("values against statistics", settings={"task": "tensor"}, verdict="equal")
    steps = Side(optimizer=ADAMW, steps=3)
    yield pair("three steps, the same settings", base=steps, verdict="equal")
    yield pair("three steps of AdamW, other kernels", every_kernel, steps)
    yield pair("three steps, fused AdamW", base=steps, optimizer=adamw(fused=True))
    yield pair("three steps of SGD, other kernels", every_kernel, Side(optimizer=sgd, steps=3))
    two = MicroBatches(parts=2)
    yield pair("two micro-batches against one batch", step=two)
    yield pair("four micro-batches against two", base=Side(step=two), step=MicroBatches(parts=4))
    yield pair("separate q, k and v against one layer", change=changes.separate_qkv)
    double = Side(change=lambda parts: parts.model.double())
    yield pair("float64 on the golden side", base=double, change=None, kinds=(TRANSFORMERS,))


CLEAN = tuple(_pairs())
