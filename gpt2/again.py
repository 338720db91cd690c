"""What backward makes again instead of keeping it (activation checkpointing, Chen et al. 2016, arXiv:1604.06174).

Only what costs next to nothing beside a matrix product: elementwise operations, norms, mixes. Eager autograd keeps what
a product was given, so that the product has to be inside of what is made again, which then stops before it; the same
operations give the same bits. torch.compile tells by itself what a product keeps: there the product is outside, and
never made again; the sums of a norm may run in another order there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_enabled = True


@contextmanager
def everything_kept() -> Iterator[None]:
    """Within, nothing is made again: for measuring and predicting what that costs and spares.

    gpt2.linear's own layers, of a CPU in float32, make the GELU again all the same.
    """
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def made_again(function: Callable[..., Tensor], *kept: Tensor, random: bool = False) -> Tensor:
    """function(*kept), of which backward keeps the arguments alone and makes what else it needs again.

    random: whether the function draws, and is to draw the same again.
    """
    y: Tensor = checkpoint(
        function, *kept, use_reentrant=False, preserve_rng_state=random, determinism_check="none"
    )
    return y


def made_again_where_compiled(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for a product that is out of reach, so that eager autograd keeps it."""
    if _enabled and torch.compiler.is_compiling() and torch.is_grad_enabled():
        return made_again(function, x)
    return function(x)


def into_product(
    function: Callable[..., Tensor],
    product: Callable[[Tensor], Tensor],
    *kept: Tensor,
    random: bool = False,
) -> Tensor:
    """product(function(*kept)), of which backward keeps the arguments and makes function's result again."""
    if not (_enabled and torch.is_grad_enabled()):
        return product(function(*kept))
    if torch.compiler.is_compiling():
        return product(made_again(function, *kept, random=random))
    return made_again(lambda *parts: product(function(*parts)), *kept, random=random)
