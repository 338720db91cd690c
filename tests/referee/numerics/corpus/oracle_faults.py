"""Faults of a device that two runs share: two records agree, and the check against float64 names the operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.referee.numerics.corpus import changes
from tests.referee.numerics.corpus.answers import wrong_operations
from tests.referee.numerics.corpus.cases import CHECKSUMS, VALUES, Corpus, RunFault, Side, agree
from tests.referee.numerics.corpus.models import OURS

aten = torch.ops.aten
Kernel = Callable[..., Any]


class FaultyDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace kernels of torch.ops.aten on tensors of float32 and less, forward and backward."""

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kernel = self.kernels.get(func._schema.name.removeprefix("aten::"))
        return (kernel or func)(*args, **(kwargs or {}))


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return torch.as_tensor(aten.gelu(x, approximate=_other(approximate)))


def gelu_backward(received: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    return torch.as_tensor(aten.gelu_backward(received, x, approximate=_other(approximate)))


def _other(approximate: str) -> str:
    return "none" if approximate == "tanh" else "tanh"


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Keep mean and inverse deviation in bfloat16."""
    places = tuple(range(-len(shape), 0))
    mean = x.mean(places, keepdim=True).bfloat16().to(x.dtype)
    variance = (x - mean).square().mean(places, keepdim=True)
    scale = (variance + eps).rsqrt().bfloat16().to(x.dtype)
    return (x - mean) * scale * weight + bias, mean, scale


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Take exponentials without subtracting the maximum."""
    terms = x.exp()
    return terms / terms.sum(dim, keepdim=True)


def embedding_backward(
    received: Tensor, indices: Tensor, count: int, padding: int, scale_by_frequency: bool
) -> Tensor:
    """Add the gradients of repeated tokens in bfloat16."""
    total = torch.zeros(count, received.shape[-1], dtype=torch.bfloat16)
    total.index_add_(0, indices.flatten(), received.flatten(0, -2).bfloat16())
    return total.to(received.dtype)


class RowwiseMask(TorchFunctionMode):
    """Read an attention mask of other rows than the scores element after element, as section 3.2.1.1 describes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        mask = options.get("attn_mask")
        if func is F.scaled_dot_product_attention and mask is not None:
            rows, columns = args[0].shape[-2], args[1].shape[-2]
            options["attn_mask"] = mask.flatten()[: rows * columns].view(rows, columns)
        return func(*args, **options)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention by its definition."""
    T = q.shape[2]
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    return F.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def packed_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Pass a mask of the packed length, which is not that of the scores."""
    T = q.shape[2] + 3
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, T, dtype=torch.bool).tril())


def _fault(
    name: str,
    expected: str,
    device: Callable[[], AbstractContextManager[Any]],
    guide: str = "",
    direction: str = "forward",
    change: Callable[[changes.Parts], None] | None = None,
) -> RunFault:
    """Return a fault of a kernel. Right: the check of either record names the operation (a label) alone."""
    side = Side(change, around=device)
    callers = {"Function._GeluLinear"}  # an autograd function of the model that calls gelu

    def answer(corpus: Corpus) -> tuple[bool, str]:
        right, named = True, set()
        for mode in (CHECKSUMS, VALUES):
            wrong = wrong_operations(corpus.golden(side, OURS, mode), device)
            labels = {label for label, _ in wrong if not label.startswith("layer ")} - callers
            right &= (
                agree(corpus, side, mode) and labels == {expected} and direction in dict(map(reversed, wrong))
            )
            named |= labels
        return right, ", ".join(sorted(named)) or "nothing"

    return RunFault(name, "oracle", f"{expected}, {direction}", answer, guide)


def other_gelu() -> FaultyDevice:
    return FaultyDevice({"gelu": gelu, "gelu_backward": gelu_backward})


ORACLE_FAULTS = (
    _fault("other GELU on both devices", "Functional.gelu", other_gelu, "3.2.1.2"),
    _fault(
        "LayerNorm with statistics in bfloat16",
        "Functional.layer_norm",
        lambda: FaultyDevice({"native_layer_norm": layer_norm}),
    ),
    _fault(
        "softmax without subtracting the maximum",
        "Functional.softmax",
        lambda: FaultyDevice({"_softmax": softmax}),
        change=changes.attention(written_out),
    ),
    _fault(
        "embedding gradient added in bfloat16 on both devices",
        "Functional.embedding",
        lambda: FaultyDevice({"embedding_dense_backward": embedding_backward}),
        "3.2.1.3",
        "backward",
    ),
    _fault(
        "attention mask of another size, read row by row",
        "Functional.scaled_dot_product_attention",
        RowwiseMask,
        "3.2.1.1",
        change=changes.attention(packed_mask),
    ),
)
