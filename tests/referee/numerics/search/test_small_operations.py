"""Small operations against float64: attention, GELU, LayerNorm, cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from referee.numerics.search.fixed_modules import SMALL_OPERATIONS
from tests.referee.numerics.search.small_models import error

FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], dict[str, Any]]] = {
    "attention": (F.scaled_dot_product_attention, (2, 4, 7, 8), {"is_causal": True}),
    "attention with a mask": (
        F.scaled_dot_product_attention,
        (2, 4, 7, 8),
        {"attn_mask": torch.rand(7, 7) > 0.6, "scale": 0.3},
    ),
    "attention with a bias": (F.scaled_dot_product_attention, (2, 4, 7, 8), {"attn_mask": torch.randn(7, 7)}),
    "gelu": (F.gelu, (3, 50), {}),
    "tanh gelu": (F.gelu, (3, 50), {"approximate": "tanh"}),
    "layer_norm": (F.layer_norm, (3, 5, 8), {"normalized_shape": (5, 8)}),
    "cross_entropy": (F.cross_entropy, (6, 50), {"target": torch.tensor([1, 2, -100, 4, 49, 0])}),
    "sum of images": (F.cross_entropy, (6, 5, 4), {"target": torch.randint(5, (6, 4)), "reduction": "sum"}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_operations_have_the_result_and_gradient_of_torch_in_float64(
    name: str, dtype: torch.dtype
) -> None:
    function, shape, options = FUNCTIONS[name]
    count = 3 if function is F.scaled_dot_product_attention else 1
    draws = [torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(dtype) for k in range(count)]
    given = [one.clone().requires_grad_() for one in draws]
    exact = [one.double().requires_grad_() for one in draws]
    found = SMALL_OPERATIONS[function.__name__](*given, **options)
    doubles = {
        key: one.double() if isinstance(one, Tensor) and one.is_floating_point() else one
        for key, one in options.items()
    }
    true = function(*exact, **doubles)
    epsilon = torch.finfo(dtype).eps
    assert found.dtype == dtype
    assert error(found, true) < 2 * epsilon
    direction = torch.randn(true.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    for mine, right in zip(
        torch.autograd.grad(found, given, direction),
        torch.autograd.grad(true, exact, direction.double()),
        strict=True,
    ):
        assert error(mine, right) < 4 * epsilon
