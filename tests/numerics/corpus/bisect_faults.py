"""Faults that no comparison of records names: replays with fixes, other phases or other settings do.

Both sides of a comparison have the fault, or each record is right by itself. The search is numerics.bisect.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.train.loss_spikes import SpikeDetector
from numerics import fix
from numerics.search.fix_words import units
from numerics.search.smallest_set import smallest_set
from tests.numerics.corpus import changes
from tests.numerics.corpus.corpus import Answer
from tests.numerics.corpus.models import IDS, OURS, loss_of, ours

STEPS = 24
WRONG_STEP = 19
RIGHT = {"learning rate": 1e-3, "weight decay": 0.1, "beta1": 0.9}


@dataclass(frozen=True)
class BisectFault:
    """items: what the search is over. expected: the smallest set. shows: whether the losses show the symptom.

    change: of the model. settings: of the faulty run; the search adds them to RIGHT where they are the items.
    """

    name: str
    items: tuple[str, ...]
    expected: tuple[str, ...]
    shows: Callable[[Sequence[float]], bool]
    change: Callable[[nn.Module], None] | None = None
    settings: Mapping[str, float] | None = None
    device: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    @property
    def answer(self) -> str:
        return " and ".join(self.expected)


def spike(losses: Sequence[float]) -> bool:
    detector = SpikeDetector()
    return any(detector.observe(loss) is not None for loss in losses)


def not_finite(losses: Sequence[float]) -> bool:
    return not all(map(math.isfinite, losses))


def train(fault: BisectFault, words: str, settings: Mapping[str, float]) -> list[float]:
    """Train a small model with the fault, and with fixes. Returns its losses, up to the first that is not finite."""
    model = ours()
    if fault.change:
        fault.change(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings["learning rate"],
        betas=(settings["beta1"], 0.95),
        weight_decay=settings["weight decay"],
        fused=True,
    )
    losses: list[float] = []
    with fault.device(), fix(model, words, optimizer=optimizer):
        for step in range(STEPS):
            vars(model)["current_step"] = step
            ids = (IDS + 7 * step) % 199
            loss = loss_of(model, ids[:, :-1], ids[:, 1:])
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return losses


def cancelling(model: nn.Module) -> None:
    """Let the last norm subtract large numbers in float16 in one step: 2048.25 - 2048 is 0 there."""

    def around(forward: Any, x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        if vars(model)["current_step"] != WRONG_STEP:
            return y
        quarter = (torch.full((1,), 2048.25).half() - 2048).to(y.dtype)
        return y * (1 + 4e3 * (0.25 - quarter))

    changes.wrap(model.get_submodule("norm"), around)


@contextlib.contextmanager
def wrong_kernel() -> Iterator[None]:
    """Within the block, the fused kernel of AdamW makes the first weights 40 times as large, once."""
    right: Any = torch._fused_adamw_
    calls = 0

    def kernel(parameters: Sequence[Tensor], *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = right(parameters, *args, **options)
        if calls == WRONG_STEP:
            with torch.no_grad():
                parameters[0].mul_(40.0)
        return result

    vars(torch)["_fused_adamw_"] = kernel
    try:
        yield
    finally:
        vars(torch)["_fused_adamw_"] = right


MODULES = tuple(f"upcast:{path}" for path in units(ours()))
BISECT_FAULTS = (
    BisectFault(
        "half precision of one module gives a spike",
        (*MODULES, "small:adamw"),
        ("upcast:norm",),
        spike,
        change=cancelling,
    ),
    BisectFault(
        "wrong update by the fused kernel of AdamW",
        (*MODULES, "small:adamw"),
        ("small:adamw",),
        spike,
        device=wrong_kernel,
    ),
    BisectFault(
        "two settings that only together overflow",
        ("learning rate", "weight decay", "beta1"),
        ("learning rate", "weight decay"),
        not_finite,
        settings={"learning rate": 1.0, "weight decay": 20.0, "beta1": 0.8},
    ),
)


def answer(fault: BisectFault) -> Answer:
    """Search for the smallest set that explains the symptom. Fixes make it vanish; settings give it."""
    answers: dict[tuple[str, ...], bool] = {}

    def shows(chosen: tuple[str, ...]) -> bool:
        if chosen not in answers:
            settings = RIGHT | {name: fault.settings[name] for name in chosen} if fault.settings else RIGHT
            words = "" if fault.settings else " ".join(chosen)
            answers[chosen] = fault.shows(train(fault, words, settings))
        return answers[chosen]

    holds = shows if fault.settings else lambda chosen: not shows(chosen)
    found = smallest_set(fault.items, holds)
    named = " and ".join(found or ("nothing",))
    words = f"{named}; {len(answers)} replays"
    return Answer(fault.name, OURS, "bisect", words, found == fault.expected, named)
