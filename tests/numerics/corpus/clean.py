"""Pairs that differ by correct kernels, or in nothing: a verdict `diverges` is a false alarm."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from numerics.compare.run import Comparison, compare_records
from numerics.repeat.conditions import threads
from tests.numerics.corpus import changes
from tests.numerics.corpus.changes import Parts
from tests.numerics.corpus.corpus import Answer, FaultCorpus, found, named, record_run
from tests.numerics.corpus.faults import ADAMW, PairSide, PlantedFault
from tests.numerics.corpus.models import OURS, TRANSFORMERS, MicroBatches


@contextlib.contextmanager
def every_kernel() -> Iterator[None]:
    with threads(2), no_mkldnn(), math_attention():
        yield


@contextlib.contextmanager
def autocast_without_mkldnn() -> Iterator[None]:
    with autocast(), no_mkldnn():
        yield


def no_mkldnn() -> AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


def math_attention() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def eager_attention(parts: Parts) -> None:
    parts.model.config._attn_implementation = "eager"


def in_float64(parts: Parts) -> None:
    parts.model.double()


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = ADAMW(model)
    for group in optimizer.param_groups:
        group |= {"fused": True, "foreach": False}
    return optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def _pairs() -> Iterator[PlantedFault]:
    rounding = "rounding"

    def pair(
        name: str,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        base: PairSide | None = None,
        verdict: str = rounding,
        kinds: tuple[str, ...] = (OURS, TRANSFORMERS),
        **target: Any,
    ) -> PlantedFault:
        golden = base or PairSide()
        changed = dataclasses.replace(golden, around=around, **target)
        return PlantedFault(name, "", changed, golden, verdict=verdict, kinds=kinds)

    yield pair("the same settings", verdict="equal")
    yield pair("another process", other_process=True, verdict="equal")
    yield pair("two threads", lambda: threads(2))
    yield pair("oneDNN off", no_mkldnn)
    yield pair("another attention kernel", math_attention)
    yield pair("threads, oneDNN and attention kernel", every_kernel)
    yield pair("autocast, oneDNN off", autocast_without_mkldnn, PairSide(around=autocast))
    yield pair("eager attention", change=eager_attention, kinds=(TRANSFORMERS,))
    yield pair("modules against modules and functions", settings={"level": "L0"}, verdict="equal")
    yield pair("values against statistics", settings={"task": "tensor"}, verdict="equal")
    steps = PairSide(optimizer=ADAMW, steps=3)
    yield pair("three steps, the same settings", base=steps, verdict="equal")
    yield pair("three steps of AdamW, other kernels", every_kernel, steps)
    yield pair("three steps, fused AdamW", base=steps, optimizer=fused_adamw)
    yield pair("three steps of SGD, other kernels", every_kernel, PairSide(optimizer=sgd, steps=3))
    yield pair("two micro-batches against one batch", step=MicroBatches(parts=2))
    yield pair(
        "four micro-batches against two",
        base=PairSide(step=MicroBatches(parts=2)),
        step=MicroBatches(parts=4),
    )
    yield pair("separate q, k and v against one layer", change=changes.separate_qkv)
    yield pair(
        "float64 on the golden side", base=PairSide(change=in_float64), change=None, kinds=(TRANSFORMERS,)
    )


CLEAN: tuple[PlantedFault, ...] = tuple(_pairs())


def answer(corpus: FaultCorpus, pair: PlantedFault, kind: str, mode: str) -> Answer:
    """Record a pair, compare and judge: right without `diverges`, and with `equal` where that is expected."""
    golden = corpus.golden(pair.golden, kind, mode)
    if pair.target.other_process:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            count = torch.get_num_threads()
            target = pool.submit(record_by_name, corpus.folder, pair.name, kind, mode, count).result()
    else:
        target = record_run(corpus.folder, pair.target, kind, mode)
    comparison = compare_records(target, golden)
    right = comparison.verdict in {"equal", pair.verdict}
    return Answer(pair.name, kind, mode, found(comparison), right, named(comparison), growth(comparison))


def growth(comparison: Comparison) -> float:
    """Return the largest error relative to what explains it."""
    return max((size for step in comparison.steps for size, _ in step.judgement.growths), default=0.0)


def record_by_name(folder: Path, name: str, kind: str, mode: str, count: int) -> Path:
    """Record the target of a pair in this process with `count` threads."""
    pair = next(pair for pair in CLEAN if pair.name == name)
    with threads(count):
        return record_run(folder, pair.target, kind, mode)
