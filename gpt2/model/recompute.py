"""Recompute activations in backward (activation checkpointing, Chen et al. 2016, arXiv:1604.06174).

Eager autograd saves the input of a matrix product. So the product lies inside the checkpointed function, and the
recomputation stops before it. torch.compile chooses by itself which inputs a product saves. There the product lies
outside and is never recomputed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def checkpoint_through_linear(
    function: Callable[..., Tensor],
    linear: Callable[[Tensor], Tensor],
    *arguments: Tensor,
    random: bool = False,
) -> Tensor:
    """Compute linear(function(*arguments)). Saves the arguments only and recomputes function's result in backward.

    random: the function draws random numbers; backward draws the same ones.
    """

    def checkpointed(inner: Callable[..., Tensor]) -> Tensor:
        y: Tensor = checkpoint(
            inner, *arguments, use_reentrant=False, preserve_rng_state=random, determinism_check="none"
        )
        return y

    if not torch.is_grad_enabled():
        return linear(function(*arguments))
    if torch.compiler.is_compiling():
        return linear(checkpointed(function))
    return checkpointed(lambda *parts: linear(function(*parts)))
