"""Recompute activations in backward (activation checkpointing, Chen et al. 2016, arXiv:1604.06174).

Only cheap operations are recomputed: elementwise operations, norms, mixes. Their results have the same bits.

Eager autograd saves the input of a matrix product. So the product lies inside the checkpointed function, and the
recomputation stops before it. torch.compile chooses by itself which inputs a product saves. There the product lies
outside and is never recomputed; a norm may sum in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_enabled = False


@contextmanager
def recompute_activations() -> Iterator[None]:
    """Within the block, recompute GELUs, and norms where the model is compiled. Saves a third of the bytes a token.

    Training does not use it yet: its cost on a GPU is not measured.
    """
    global _enabled
    before, _enabled = _enabled, True
    try:
        yield
    finally:
        _enabled = before


def recompute_enabled() -> bool:
    """Whether activations are recomputed here: inside `recompute_activations` and with gradients enabled."""
    return _enabled and torch.is_grad_enabled()


def checkpointed(function: Callable[..., Tensor], *arguments: Tensor, random: bool = False) -> Tensor:
    """Compute function(*arguments). Saves the arguments only and recomputes the rest in backward.

    random: the function draws random numbers; draw the same ones in backward.
    """
    y: Tensor = checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=random, determinism_check="none"
    )
    return y


def checkpoint_through_linear(
    function: Callable[..., Tensor],
    linear: Callable[[Tensor], Tensor],
    *arguments: Tensor,
    random: bool = False,
) -> Tensor:
    """Compute linear(function(*arguments)). Saves the arguments only and recomputes function's result in backward."""
    if not torch.is_grad_enabled():
        return linear(function(*arguments))
    if torch.compiler.is_compiling():
        return linear(checkpointed(function, *arguments, random=random))
    return checkpointed(lambda *parts: linear(function(*parts)), *arguments, random=random)
