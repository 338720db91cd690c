"""Find operations that draw random numbers: two calls with equal arguments differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

RANDOM = "random: two calls with equal inputs differ"
UNITS = (
    8  # of rounding by which two calls may differ, as sums of another order do; half the digits if none drew
)


class CallResults(Protocol):
    """Results and gradients of a call."""

    @property
    def results(self) -> Sequence[Tensor]: ...

    @property
    def gradients(self) -> Sequence[Tensor | None]: ...


class Randomness:
    """Watch the generators of torch around a call. always: repeat the call also where they did not change."""

    def __init__(self, device: torch.device, always: bool) -> None:
        self.device = device
        self.always = always
        self.drawn = False
        self.found = False

    def __enter__(self) -> Randomness:
        self.before = self._states()
        return self

    def __exit__(self, *error: Any) -> None:
        after = self._states()
        self.drawn = any(not torch.equal(one, other) for one, other in zip(self.before, after, strict=True))

    def differ(self, first: CallResults, repeat: Callable[[], CallResults]) -> bool:
        """Return whether a second call has other results or gradients. It runs only where it may."""
        if self.always or self.drawn:
            second = repeat()
            pairs = zip(
                [*first.results, *first.gradients], [*second.results, *second.gradients], strict=False
            )
            self.found = any(
                _far(one, other, self.drawn) for one, other in pairs if one is not None and other is not None
            )
        return self.found

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            if hasattr(module, "get_rng_state"):
                states.append(module.get_rng_state(self.device).clone())
        return states


def _far(one: Tensor, other: Tensor, drawn: bool) -> bool:
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    usable = one.isfinite() & other.isfinite()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return True
    wide = torch.complex128 if one.is_complex() else torch.float64
    x, y = one.detach()[usable].cpu().to(wide), other.detach()[usable].cpu().to(wide)
    eps = torch.finfo(one.dtype).eps
    return bool((x - y).norm() > (UNITS * eps if drawn else eps**0.5) * y.norm())
