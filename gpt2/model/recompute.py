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

MOST_SAVED = (
    2**20
)  # bytes of an activation that is saved: recomputing it would slow a small model's step by 5 %


def is_small(*tensors: Tensor) -> bool:
    """Whether each tensor is saved for backward instead of recomputed."""
    return all(tensor.nbytes <= MOST_SAVED for tensor in tensors)


def checkpoint_through_linear(
    function: Callable[..., Tensor],
    linear: Callable[[Tensor], Tensor],
    *arguments: Tensor,
    random: bool = False,
) -> Tensor:
    """Compute linear(function(*arguments)). Saves the arguments only and recomputes function's result in backward.

    Small arguments save what autograd saves; the first checkpoint of a process imports torch._dynamo, which takes 2 s.
    random: the function draws random numbers; backward draws the same ones.
    """

    def checkpointed(inner: Callable[..., Tensor]) -> Tensor:
        y: Tensor = checkpoint(
            inner, *arguments, use_reentrant=False, preserve_rng_state=random, determinism_check="none"
        )
        return y

    if torch.is_grad_enabled() and torch.compiler.is_compiling():
        return linear(checkpointed(function))
    if not torch.is_grad_enabled() or is_small(*arguments):
        return linear(function(*arguments))
    return checkpointed(lambda *parts: linear(function(*parts)))
