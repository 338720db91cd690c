"""Faults that no second run shows: two runs of the faulty device agree.

The check against float64 names the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.compare.run import compare_records
from numerics.oracle.check import Oracle
from numerics.oracle.record import operations
from numerics.oracle.results import Check, Skipped, worst_first
from tests.numerics.corpus import changes
from tests.numerics.corpus.corpus import Answer, record_run
from tests.numerics.corpus.faults import PairSide
from tests.numerics.corpus.models import OURS

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


@dataclass(frozen=True)
class OracleFault:
    """device: a context with the faulty kernel. expected: the label of the operation, and the direction of its error.

    change: of the model. case: section of the guide with such a case. callers: labels of the model's own autograd
    functions that call the operation: they may be named beside it.
    """

    name: str
    expected: str
    device: Callable[[], AbstractContextManager[Any]]
    direction: str = "forward"
    change: Callable[[changes.Parts], None] | None = None
    case: str = ""
    callers: frozenset[str] = frozenset()

    @property
    def answer(self) -> str:
        return f"{self.expected}, {self.direction}"


def _kernels(**kernels: Kernel) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: FaultyDevice(kernels)


ORACLE_FAULTS = (
    OracleFault(
        "other GELU on both devices",
        "Functional.gelu",
        _kernels(gelu=gelu, gelu_backward=gelu_backward),
        case="3.2.1.2",
        callers=frozenset({"Function._GeluLinear"}),
    ),
    OracleFault(
        "LayerNorm with statistics in bfloat16",
        "Functional.layer_norm",
        _kernels(native_layer_norm=layer_norm),
    ),
    OracleFault(
        "softmax without subtracting the maximum",
        "Functional.softmax",
        _kernels(_softmax=softmax),
        change=changes.attention(written_out),
    ),
    OracleFault(
        "embedding gradient added in bfloat16 on both devices",
        "Functional.embedding",
        _kernels(embedding_dense_backward=embedding_backward),
        "backward",
        case="3.2.1.3",
    ),
    OracleFault(
        "attention mask of another size, read row by row",
        "Functional.scaled_dot_product_attention",
        RowwiseMask,
        change=changes.attention(packed_mask),
        case="3.2.1.1",
    ),
)


def oracle_checks(
    path: Path, device: Callable[[], AbstractContextManager[Any]]
) -> tuple[list[Check], list[Skipped]]:
    """Check a record on a faulty device. Returns its checks, worst first, and what was skipped."""
    oracle = Oracle(torch.device("cpu"), around=device)
    for found in operations(path):
        if isinstance(found, Skipped):
            oracle.skipped.append(found)
        else:
            oracle.check(found)
    return worst_first(oracle.checks), oracle.skipped


def record_on(folder: Path, fault: OracleFault, mode: str, kind: str = OURS) -> Path:
    """Record a step on the faulty device."""
    return record_run(folder, PairSide(fault.change, around=fault.device), kind, mode)


def answer(folder: Path, fault: OracleFault, mode: str, kind: str = OURS) -> Answer:
    """Record two runs on the faulty device. Right: they are equal, and the check names the operation."""
    first, second = (record_on(folder, fault, mode, kind) for _ in range(2))
    compared = compare_records(first, second).verdict
    wrong = [check for check in oracle_checks(first, fault.device)[0] if check.wrong]
    named = {check.label for check in wrong if not check.label.startswith("layer ")}
    right = (
        compared == "equal"
        and named - fault.callers == {fault.expected}
        and fault.direction in {c.direction for c in wrong}
    )
    listed = ", ".join(sorted(named)) or "none"
    words = f"compare: {compared}; {len(wrong)} checks wrong: {listed}"
    return Answer(fault.name, kind, mode, words, right, listed)
