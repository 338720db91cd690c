"""Give the elements of any tensor as a dense real tensor, which the reductions can read."""

from __future__ import annotations

import torch
from torch import Tensor

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def readable(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the stored elements, dense and real, and how many zeros of the tensor are not stored.

    A complex tensor has two real elements for each of its own. A nested tensor has those of all its parts.
    """
    if tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        stored = tensor = torch.cat(parts) if parts else torch.empty(0)
    elif tensor.layout == torch.sparse_coo:
        stored = tensor.coalesce().values()
    elif tensor.layout in COMPRESSED:
        stored = tensor.values()
    elif tensor.layout != torch.strided:
        stored = tensor = tensor.to_dense()
    else:
        stored = tensor
    absent = tensor.numel() - stored.numel()
    return real(stored), 2 * absent if stored.is_complex() else absent


def real(tensor: Tensor) -> Tensor:
    """Return a dense tensor with real elements: pairs of real and imaginary parts of a complex one."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
