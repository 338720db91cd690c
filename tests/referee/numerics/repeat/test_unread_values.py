"""Tensors of every kind are hashed by the tensors that they consist of; those without values are counted and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from referee.numerics import repeat_step
from referee.numerics.record.tensor_statistics import describe_tensor, digest
from referee.numerics.repeat import repeat_evidence as causes
from referee.numerics.repeat.repeat_evidence import LIMITED, Repetition

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's prototypes

X = torch.arange(1.0, 25.0).view(4, 6)
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "hybrid sparse": lambda x: x.view(2, 2, 6).to_sparse(1),
    "compressed rows": lambda x: x.to_sparse_csr(),
    "compressed columns": lambda x: x.to_sparse_csc(),
    "compressed blocks of rows": lambda x: x.to_sparse_bsr((2, 2)),
    "compressed blocks of columns": lambda x: x.to_sparse_bsc((2, 2)),
    "oneDNN": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[:1], x[1:]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.25, 3, torch.quint8),
    "quantized by rows": lambda x: torch.quantize_per_channel(
        x, torch.full((4,), 0.25), torch.zeros(4), 0, torch.qint8
    ),
    "float4": lambda x: x.to(torch.uint8).view(torch.float4_e2m1fn_x2),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative view": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_changed_value_changes_digest_and_checksum(kind: str) -> None:
    make, changed = KINDS[kind], X.clone()
    changed[2, 3] += 1
    assert int(digest(make(X))) == int(digest(make(X.clone())))
    assert int(digest(make(X))) != int(digest(make(changed)))
    sums = [describe_tensor(make(values), checksums=True)["md5"] for values in (X, X.clone(), changed)]
    assert sums[0] == sums[1] != sums[2]


def test_the_structure_enters_the_digest() -> None:
    """Equal numbers at other indices or in other rows are another tensor."""
    values = torch.ones(2)
    at = [torch.sparse_coo_tensor(torch.tensor([[0, place]]), values, (4,)) for place in (1, 2)]
    assert int(digest(at[0])) != int(digest(at[1]))
    split = [torch.nested.nested_tensor([X[:k], X[k:]], layout=torch.jagged) for k in (1, 2)]
    assert int(digest(split[0])) != int(digest(split[1]))


def fake(value: float = 0.0) -> Tensor:
    with FakeTensorMode():
        return torch.full((3,), value)


class Opaque(Tensor):
    """Hide a tensor: a subclass that computes and does not show its tensors."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name == "aten::detach"
        return Opaque(args[0].inner)


def unequal_results(make: Callable[[Tensor], Tensor], times: int = 3) -> Repetition:
    """Repeat a step whose result differs from call to call."""
    calls = iter(range(1, 1000))
    return repeat_step(lambda: make(torch.full((3,), float(next(calls)))), times=times, threads=1)


def test_unequal_results_of_a_kind_are_found_or_the_reservation_is_made() -> None:
    """With a digest of 0 for each of these, all of them were "reproducible"."""
    for kind in ("sparse", "jagged", "quantized"):
        found = unequal_results(lambda x, kind=kind: KINDS[kind](x.view(3, 1)))  # type: ignore[misc]
        assert found.is_fault, kind
        assert found.uncompared() == []
    for hidden in (Opaque, lambda x: fake()):
        found = unequal_results(hidden)
        assert found.verdict == causes.REPRODUCIBLE + LIMITED
        assert any(text.startswith("returned 0: ") for text in found.uncompared())


def test_a_clean_step_has_no_reservation() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)

    def step() -> Tensor:
        loss: Tensor = embedding(torch.tensor([1, 1, 4])).square().sum()
        loss.backward()
        return loss.detach()

    found = repeat_step(step, {"model": embedding}, times=2, threads=1)
    assert (found.verdict, found.uncompared()) == (causes.REPRODUCIBLE, [])
