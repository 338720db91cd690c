"""Find an attention mask whose rows have another length than the scores (section 3.2.1.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numerics.oracle.operation import Operation


def misread_mask(operation: Operation) -> str:
    """Say what is wrong with the mask of scaled_dot_product_attention; "" where nothing is."""
    if not operation.label.endswith("scaled_dot_product_attention"):
        return ""
    args: dict[str, Any] = dict(zip(("query", "key", "value", "attn_mask"), operation.args, strict=False))
    args |= operation.kwargs
    query, key, mask = (args.get(name) for name in ("query", "key", "attn_mask"))
    if not (
        isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(mask, Tensor) and mask.dim() > 1
    ):
        return ""
    rows, columns = query.shape[-2], key.shape[-2]
    if any(size not in (1, full) for size, full in zip(mask.shape[-2:], (rows, columns), strict=True)):
        return f"attn_mask has rows and columns {list(mask.shape[-2:])}, the scores have {[rows, columns]}"
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    for page in allowed.reshape(-1, *mask.shape[-2:])[:1]:
        length = causal_row_length(page)
        if length and length != page.shape[-1]:
            return (
                f"attn_mask is a causal mask with rows of {length} elements, read with rows of {page.shape[-1]}: "
                "tokens attend to later ones"
            )
    return ""


def causal_row_length(mask: Tensor) -> int:
    """Return the length of a row of the causal mask whose elements a mask has in order; 0 where there is none."""
    flat = mask.flatten()
    places = flat.nonzero().flatten()
    if len(places) < 4 or int(places[0]) or bool(flat.all()):
        return 0
    length = int(places[1])  # where the second row begins
    rows = -(-len(flat) // length)
    causal = torch.ones(rows, length, dtype=torch.bool).tril().flatten()[: len(flat)]
    return length if bool((causal == flat.cpu()).all()) else 0
