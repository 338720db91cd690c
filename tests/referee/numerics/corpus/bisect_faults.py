"""Faults that both sides of a comparison have: replays with fixes or other settings name the smallest set."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.watch import SpikeDetector
from referee.numerics import fix
from referee.numerics.search.bisect_replays import smallest_set
from referee.numerics.search.fix_words import units
from tests.referee.numerics.corpus import changes
from tests.referee.numerics.corpus.cases import Corpus, RunFault
from tests.referee.numerics.corpus.models import IDS, loss_of, ours

STEPS = 24
WRONG_STEP = 19
RIGHT = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9}


def shows_symptom(losses: Sequence[float]) -> bool:
    """Return whether a loss spikes or is not finite."""
    detector = SpikeDetector()
    return any(not math.isfinite(loss) or detector.observe(loss) is not None for loss in losses)


def train(
    words: str, settings: Mapping[str, float], model: nn.Module, around: AbstractContextManager[Any]
) -> list[float]:
    """Train a small model with fixes and settings. Returns its losses, up to the first that is not finite."""
    betas = settings["beta1"], 0.95
    rates = {name: settings[name] for name in ("lr", "weight_decay")}
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, fused=True, **rates)
    losses: list[float] = []
    with around, fix(model, words, optimizer=optimizer):
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


def _fault(
    name: str,
    items: tuple[str, ...],
    expected: tuple[str, ...],
    change: Callable[[nn.Module], None] = lambda model: None,
    wrong: Mapping[str, float] | None = None,
    device: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> RunFault:
    """Return a fault. items: fixes, which make the symptom vanish, or names of `wrong` settings, which give it."""

    def answer(corpus: Corpus) -> tuple[bool, str]:
        answers: dict[tuple[str, ...], bool] = {}

        def holds(chosen: tuple[str, ...]) -> bool:
            if chosen not in answers:
                model = ours()
                change(model)
                settings = RIGHT | {item: wrong[item] for item in chosen} if wrong else RIGHT
                losses = train("" if wrong else " ".join(chosen), settings, model, device())
                answers[chosen] = shows_symptom(losses) is (wrong is not None)
            return answers[chosen]

        found = smallest_set(items, holds)
        return found == expected, " and ".join(found or ("nothing",))

    return RunFault(name, "bisect", " and ".join(expected), answer)


FIXES = (*(f"upcast:{path}" for path in units(ours())), "small:adamw")
WRONG = {"lr": 1.0, "weight_decay": 20.0, "beta1": 0.8}
BISECT_FAULTS = (
    _fault("half precision of one module gives a spike", FIXES, ("upcast:norm",), cancelling),
    _fault("wrong update by the fused kernel of AdamW", FIXES, ("small:adamw",), device=wrong_kernel),
    _fault("two settings that only together overflow", tuple(WRONG), ("lr", "weight_decay"), wrong=WRONG),
)
