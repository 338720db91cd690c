"""The lines of `make card`, and the gates of RALEARN against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.case_step import OPTIMIZER, model_and_parts, random_batch
from bench.cases import Sizes
from bench.runner import BenchError, BenchWorker
from gpt2.training_step import Stepper
from referee.numerics.describe import WITHOUT_FLOAT64
from runtime import attention_kernels
from runtime.batch_plan import plan_batch
from runtime.resolved_target import ResolvedTarget

PASS, DIFFERS, MEASURED, NOT_RUN = "pass", "differs", "measured", "not run"


class NotRunError(Exception):
    """A check cannot run here. Its text is the reason."""


@dataclass(frozen=True)
class CardCheck:
    """One line. Of its verdicts only DIFFERS is an error; MEASURED has a number to compare with the expected one."""

    name: str
    expected: str
    measured: str  # of a check that was not run: the reason
    verdict: str
    value: float | None = None  # the measured number, which later commands read by the name
    seconds: float = 0.0  # since the line before

    @property
    def line(self) -> str:
        expected = f"; expected {self.expected}" if self.expected else ""
        return f"{self.verdict:<8} {self.seconds:6.1f} s  {self.name}: {self.measured}{expected}"


@dataclass(frozen=True)
class CheckedDevice:
    """The device to check."""

    resolved: ResolvedTarget
    folder: Path  # of studies, which later commands read
    values: Mapping[str, float] = field(default_factory=dict)  # measured numbers by the names of their lines

    @property
    def on_cpu(self) -> bool:
        return self.resolved.device == "cpu"


Question = Callable[[CheckedDevice], Iterator[CardCheck]]


def judge(name: str, expected: str, measured: str, good: bool, reason: str = "") -> CardCheck:
    """Return the verdict on a measurement. reason: why it cannot be judged here, else empty."""
    return (
        not_run(name, expected, reason)
        if reason
        else CardCheck(name, expected, measured, PASS if good else DIFFERS)
    )


def not_run(name: str, expected: str, reason: str) -> CardCheck:
    return CardCheck(name, expected, reason, NOT_RUN)


def number(name: str, expected: str, measured: str, value: float) -> CardCheck:
    """Return a line that is not judged. value: the number of `measured`."""
    return CardCheck(name, expected, measured, MEASURED, value)


SHAPES = {False: Sizes("124m-t512", 12, 12, 768, 512), True: Sizes("4x128-t128", 4, 4, 128, 128)}
SEQUENCES = 2
EXACT = "float64"
# What is compared with what, and the largest distance of the vectors of all layers' gate gradients, in the length of
# the second. On a CPU bfloat16 was 0.04 to 0.08 from float64; compiled and eager code round alike.
COMPARISONS = (
    ("float32", EXACT, 1e-3),
    ("bfloat16", EXACT, 0.2),
    ("bfloat16 compiled", "bfloat16", 0.05),
    ("bfloat16 compiled", EXACT, 0.2),
)
LOSS_LIMIT = 2e-3  # nats; torch 2.11 compiles a gather in the loss to one that is wrong by hundredths
LIMIT_SECONDS = 300.0


def gate_checks(card: CheckedDevice) -> Iterator[CardCheck]:
    """Compare the loss and the gradients of RALEARN's gates in each precision with float64, and compiled with eager."""
    with BenchWorker("gates") as worker:
        known: dict[str, list[float]] = {}

        def losses(precision: str) -> list[float]:
            if precision not in known:
                arguments = (card.resolved, SHAPES[card.on_cpu], precision)
                known[precision] = worker.call(gate_gradients, *arguments, limit_seconds=LIMIT_SECONDS)
            return known[precision]

        for precision, other, limit in COMPARISONS:
            name = f"gates: {precision} to {other}"
            expected = f"within {limit:g}, and the loss within {LOSS_LIMIT:g} nats"
            if precision.endswith("compiled") and card.on_cpu:
                yield not_run(name, expected, "a study on a CPU does not compile")
                continue
            if precision.startswith("bfloat16") and card.resolved.dtype == "float32" and not card.on_cpu:
                yield not_run(name, expected, f"{card.resolved.device_name} has no bfloat16")
                continue
            try:
                (loss, *gates), (other_loss, *other_gates) = losses(precision), losses(other)
            except BenchError as failure:
                yield judge(name, expected, f"{failure}", False)
                continue
            error, off = distance(gates, other_gates), abs(loss - other_loss)
            measured = f"{error:.1e} over {len(gates)} layers, loss {off:.1e} nats"
            yield judge(name, expected, measured, error <= limit and off <= LOSS_LIMIT)


def distance(found: list[float], exact: list[float]) -> float:
    """Return the Euclidean distance, relative to the length of `exact`."""
    one, other = torch.tensor([found, exact], dtype=torch.float64)
    return float((one - other).norm() / other.norm())


def gate_gradients(resolved: ResolvedTarget, sizes: Sizes, precision: str) -> list[float]:
    """Return the loss of one micro-batch and the gradient of each layer's gate, as a training step computes them.

    float64 uses the definition of attention.
    """
    exact = precision == EXACT
    config, parts = model_and_parts(sizes, "RALEARN")
    device = "cpu" if exact and resolved.device_type in WITHOUT_FLOAT64 else resolved.device
    stepper = Stepper(
        config,
        OPTIMIZER,
        plan_batch(SEQUENCES, SEQUENCES, 1, sizes.block_size),
        seed=0,
        device=device,
        dtype="float32" if exact else precision.split()[0],
        compile=precision.endswith("compiled"),
        parts=parts,
    )
    model = stepper.model.double() if exact else stepper.model
    ids_BT = random_batch(sizes, SEQUENCES, device)
    with sdpa_kernel(SDPBackend.MATH) if exact else attention_kernels.attention_context(resolved):
        with stepper.autocast():
            x_BTC = stepper._hidden(ids_BT[:, :-1].contiguous())
            loss = stepper.loss(x_BTC, model.head, ids_BT[:, 1:], model.vocabulary)
        blocks: list[Any] = list(model.blocks)
        gradients = torch.autograd.grad(loss, [block.attention.alternation_logit for block in blocks])
    return [float(value) for value in (loss.detach(), *gradients)]
