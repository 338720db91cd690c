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

_activations = False


@contextmanager
def activations_again() -> Iterator[None]:
    """Within, the model makes its GELUs again, and where it is compiled its norms: a third less kept a token.

    Not how training does it: what it costs on a GPU is to be measured first (`make bench CASES="B B:again"`).
    """
    global _activations
    before, _activations = _activations, True
    try:
        yield
    finally:
        _activations = before


def activations() -> bool:
    """Whether activations are to be made again here, for a gradient."""
    return _activations and torch.is_grad_enabled()


def made_again(function: Callable[..., Tensor], *kept: Tensor, random: bool = False) -> Tensor:
    """function(*kept), of which backward keeps the arguments alone and makes what else it needs again.

    random: whether the function draws, and is to draw the same again.
    """
    y: Tensor = checkpoint(
        function, *kept, use_reentrant=False, preserve_rng_state=random, determinism_check="none"
    )
    return y


def into_product(
    function: Callable[..., Tensor],
    product: Callable[[Tensor], Tensor],
    *kept: Tensor,
    random: bool = False,
) -> Tensor:
    """product(function(*kept)), of which backward keeps the arguments and makes function's result again."""
    if not torch.is_grad_enabled():
        return product(function(*kept))
    if torch.compiler.is_compiling():
        return product(made_again(function, *kept, random=random))
    return made_again(lambda *parts: product(function(*parts)), *kept, random=random)
