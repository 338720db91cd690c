"""Calls of torch's own kernels, which are correct: a check that is wrong is a false alarm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from referee.numerics.describe import tensors_in
from referee.numerics.rounding.operation_checks import random_gradients
from referee.numerics.rounding.within_rounding import (
    BOUND,
    RANDOM,
    CallOutput,
    Error,
    FunctionCall,
    converted,
    single,
    within_rounding,
    without_draws,
)

Call = tuple[str, Callable[..., Any], list[Any], dict[str, Any]]


def calls(dtype: torch.dtype, seed: int = 0, rows: int = 24, width: int = 48) -> Iterator[Call]:
    """Yield name, function, arguments and options."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=draws) * scale + mean).to(dtype)

    def positive(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=draws) + 0.1).to(dtype)

    def index(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=draws)

    x, y = normal(rows, width), normal(rows, width)
    offset = normal(rows, width, mean=10.0)
    image = normal(2, 4, 9, 9)
    heads = [normal(2, 4, rows, 16) for _ in range(3)]
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    weight, bias = normal(width, scale=0.1, mean=1.0), normal(width, scale=0.1)
    for name, function in (
        ("exp", torch.exp), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid), ("erf", torch.erf), ("sin", torch.sin),
        ("cos", torch.cos), ("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu), ("softplus", F.softplus),
        ("expm1", torch.expm1), ("elu", F.elu), ("leaky_relu", F.leaky_relu), ("mish", F.mish), ("neg", torch.neg),
        ("logsigmoid", F.logsigmoid), ("hardswish", F.hardswish), ("square", torch.square), ("abs", torch.abs),
    ):  # fmt: skip
        yield name, function, [x], {}
    for name, function in (
        ("log", torch.log),
        ("sqrt", torch.sqrt),
        ("rsqrt", torch.rsqrt),
        ("log1p", torch.log1p),
    ):
        yield name, function, [positive(rows, width)], {}
    yield "gelu tanh", F.gelu, [x], {"approximate": "tanh"}
    for name, both in (
        ("add", torch.add),
        ("sub", torch.sub),
        ("mul", torch.mul),
        ("maximum", torch.maximum),
    ):
        yield name, both, [x, y], {}
    yield "add a number", torch.add, [x, 0.1], {}
    yield "mul a number", torch.mul, [x, 0.3], {}
    yield "add alpha", torch.add, [x, y], {"alpha": 0.7}
    yield "div", torch.div, [x, positive(rows, width)], {}
    yield "div a number", torch.div, [x, 3.0], {}
    yield "pow 3", torch.pow, [x, 3.0], {}
    yield "addcmul", torch.addcmul, [x, y, offset], {"value": 0.5}
    yield "lerp", torch.lerp, [x, y, 0.3], {}
    yield "clamp", torch.clamp, [x, -1.0, 1.0], {}
    yield "where", torch.where, [x > 0, x, y], {}
    yield "cat", torch.cat, [[x, y], 1], {}
    for kind, values in (("", x), (" of an offset", offset)):
        yield f"sum{kind}", torch.sum, [values], {}
        yield f"sum of rows{kind}", torch.sum, [values, 1], {}
        yield f"mean{kind}", torch.mean, [values, 0], {}
        yield f"var{kind}", torch.var, [values, 1], {}
        yield f"std{kind}", torch.std, [values], {}
        yield f"softmax{kind}", F.softmax, [values, -1], {}
        yield f"log_softmax{kind}", F.log_softmax, [values, -1], {}
        yield f"logsumexp{kind}", torch.logsumexp, [values, -1], {}
        yield f"layer_norm{kind}", F.layer_norm, [values, (width,), weight, bias], {}
        yield f"rms_norm{kind}", F.rms_norm, [values, (width,), weight], {}
        yield f"norm{kind}", torch.linalg.vector_norm, [values], {}
        yield f"cumsum{kind}", torch.cumsum, [values, 1], {}
        yield f"normalize{kind}", F.normalize, [values], {}
    yield "amax", torch.amax, [x, 1], {}
    yield "prod", torch.prod, [positive(rows, 6), 1], {}
    yield "matmul", torch.matmul, [x, normal(width, 40)], {}
    yield "bmm", torch.bmm, [normal(3, rows, width), normal(3, width, 8)], {}
    yield "baddbmm", torch.baddbmm, [normal(3, rows, 8), normal(3, rows, width), normal(3, width, 8)], {}
    yield "linear", F.linear, [x, normal(40, width, scale=0.1), normal(40)], {}
    yield "linear, large bias", F.linear, [x, normal(40, width, scale=0.1), normal(40, mean=100.0)], {}
    yield "linear without bias", F.linear, [normal(2, rows, width), normal(40, width)], {}
    yield "einsum", torch.einsum, ["ij,kj->ik", x, y], {}
    yield "conv1d", F.conv1d, [normal(2, 4, 40), normal(6, 4, 5), normal(6)], {}
    yield "conv2d", F.conv2d, [image, normal(6, 4, 3, 3)], {"padding": 1}
    yield "group_norm", F.group_norm, [image, 2, normal(4, mean=1.0), normal(4)], {}
    yield "batch_norm", F.batch_norm, [image, None, None, normal(4), normal(4), True], {}
    yield "max_pool2d", F.max_pool2d, [image, 3], {}
    yield "avg_pool2d", F.avg_pool2d, [image, 3], {}
    yield "attention", F.scaled_dot_product_attention, heads, {}
    yield "causal attention", F.scaled_dot_product_attention, heads, {"is_causal": True}
    yield "masked attention", F.scaled_dot_product_attention, heads, {"attn_mask": mask}
    yield "scaled attention", F.scaled_dot_product_attention, heads, {"is_causal": True, "scale": 0.3}
    yield "embedding", F.embedding, [index(10, 3, rows), normal(10, width)], {}
    yield "embedding of one token", F.embedding, [index(1, 4 * rows), normal(3, width)], {}
    yield "index_add", torch.index_add, [normal(6, width), 0, index(6, rows), x], {}
    yield "scatter_add", torch.scatter_add, [normal(6, width), 0, index(6, rows, width), x], {}
    yield "gather", torch.gather, [x, 1, index(width, rows, 5)], {}
    yield "getitem", torch.Tensor.__getitem__, [x, index(rows, 40)], {}
    yield "cross_entropy", F.cross_entropy, [normal(rows, 97, scale=3.0), index(97, rows)], {}
    yield "cross_entropy, sum", F.cross_entropy, [normal(rows, 97), index(97, rows)], {"reduction": "sum"}
    yield "mse_loss", F.mse_loss, [x, y], {}
    yield "smooth_l1_loss", F.smooth_l1_loss, [x, y], {}
    yield "binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, [x, torch.rand_like(y)], {}
    yield "kl_div", F.kl_div, [F.log_softmax(x, -1), F.softmax(y, -1)], {"reduction": "batchmean"}
    yield "cosine_similarity", F.cosine_similarity, [x, y], {}


def received(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None = None
) -> list[Tensor | None]:
    """Return a normal gradient for each real result."""
    return random_gradients(tensors_in(function(*args, **(options or {}))))


def errors_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    *,
    results: Sequence[Tensor] | None = None,
    received: Sequence[Tensor | None] | None = None,
    reference: Callable[..., Any] | None = None,
) -> list[Error]:
    """Return the errors of a call against the reference, by default itself; of 16 bits also of the call in float32.

    results: what it returned; by default it is run.
    """
    call = FunctionCall(function, args, options or {}, received)
    done = CallOutput(results) if results is not None else without_draws(lambda: call.run(lambda x: x))
    if done is None:
        return [Error("results", 0.0, math.inf, None, RANDOM)]
    found = within_rounding(dataclasses.replace(call, function=reference or function), done)
    if results is None and any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in call.tensors):
        wide, gradients = (converted(part, single) for part in (list(args), received))
        found += errors_of(function, wide, options, received=gradients, reference=reference)
    return found


def main() -> None:
    """Print how large the errors of all dtypes, two sizes and two seeds are, in units of rounding."""
    torch.set_num_threads(1)
    sizes = sorted(
        error.units * BOUND / error.bound
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for rows, width in ((5, 33), (24, 48))
        for seed in range(2)
        for _, function, args, options in calls(dtype, seed, rows, width)
        for error in errors_of(function, args, options, received=received(function, args, options))
    )
    count = len(sizes)
    print(
        f"{count} results and gradients: median {sizes[count // 2]:.2g}, 99 % {sizes[-count // 100]:.2g}, "
        f"largest {sizes[-1]:.2g}, {sum(size > BOUND for size in sizes)} beyond {BOUND:g}"
    )


if __name__ == "__main__":
    main()
