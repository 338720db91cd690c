"""Linear head + cross-entropy without ever holding the (tokens, vocabulary) logits.

The rows are taken in chunks. Where gradients are wanted, each chunk's gradient is made at once, while its
logits exist, so backward only scales what is already there. The idea of fusing head and loss by chunks is
that of Liger Kernel (Hsu et al., 2024, arXiv:2410.10989) and of torchtune's chunked cross-entropy.

Padded vocabulary columns take part in neither the softmax nor the gradient: the head is cut to
`vocabulary` rows, and the gradient of the padding is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.linear import HEAD_WIDE, onednn, product

CHUNK_ROWS = {"cpu": 256, "cuda": 4096}  # rows of logits alive at once; on two CPU cores 512 is no faster
IGNORED = -1


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that the matrix products run in: autocast's where it is on, else the input's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _chunk_rows(x: Tensor) -> int:
    return CHUNK_ROWS.get(x.device.type, 512)


class _Head:
    """Logits of one chunk after another, each in the memory of the last: fresh pages would cost more than a product."""

    def __init__(self, w_VC: Tensor, rows: int, wide: torch.dtype) -> None:
        self.w_VC, self.rows, self.wide = w_VC, rows, wide
        self._buffer_NV: Tensor | None = None

    def logits(self, x: Tensor) -> Tensor:
        """x @ w_VC.T in the wide dtype. The caller drops what it has of the chunk before."""
        if onednn(x, HEAD_WIDE):
            return product(x, self.w_VC)  # a heap that keeps its blocks (study.child) gives it the last one's
        if self._buffer_NV is None:
            shape = (self.rows, self.w_VC.shape[0])
            self._buffer_NV = torch.empty(shape, dtype=self.wide, device=x.device)
        logits_NV = self._buffer_NV[: x.shape[0]]
        if x.dtype == self.wide:
            return torch.mm(x, self.w_VC.T, out=logits_NV)
        return logits_NV.copy_(x @ self.w_VC.T)


def _add_product(total_VC: Tensor, grad_NV: Tensor, x_NC: Tensor, first: bool) -> None:
    """total_VC += grad_NV.T @ x_NC, the first time =; without a temporary where the dtypes agree."""
    if grad_NV.dtype != total_VC.dtype:
        part_VC = grad_NV.T @ x_NC
        total_VC.copy_(part_VC) if first else total_VC.add_(part_VC)
    elif first:
        torch.mm(grad_NV.T, x_NC, out=total_VC)
    else:
        total_VC.addmm_(grad_NV.T, x_NC)


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x_NC @ weight_VC.T against targets_N; gradients are made in forward."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocabulary: int) -> Tensor:
        dtype = _compute_dtype(x_NC)
        wide = torch.promote_types(dtype, torch.float32)  # softmax and sums: float32, or float64 for float64
        need_x, need_weight = ctx.needs_input_grad[:2]
        count = (targets_N != IGNORED).sum().clamp(min=1).to(wide)
        loss = torch.zeros((), dtype=wide, device=x_NC.device)
        grad_x = torch.empty_like(x_NC) if need_x else None
        grad_weight = torch.empty_like(weight_VC, dtype=wide) if need_weight else None
        if grad_weight is not None:
            grad_weight[vocabulary:] = 0.0
        with torch.autocast(x_NC.device.type, enabled=False):
            w_VC = weight_VC[:vocabulary].to(dtype)
            rows = min(_chunk_rows(x_NC), x_NC.shape[0])
            head = _Head(w_VC, rows, wide)
            for start in range(0, x_NC.shape[0], rows):
                part = slice(start, start + rows)
                x, targets = x_NC[part].to(dtype), targets_N[part]
                logits_NV = head.logits(x)
                kept = targets != IGNORED
                index = targets.clamp(min=0)[:, None]
                target_logits = logits_NV.gather(1, index)
                largest = logits_NV.amax(dim=-1, keepdim=True)
                logits_NV.sub_(largest).exp_()
                total = logits_NV.sum(dim=-1, keepdim=True)
                loss += ((total.log() + largest - target_logits)[:, 0] * kept).sum()
                if not (need_x or need_weight):
                    del logits_NV
                    continue
                # d loss / d logits = (softmax - onehot) / count, in place of the logits
                share = (kept / count).to(wide)[:, None]
                grad = logits_NV.mul_(share / total).scatter_add_(1, index, -share).to(dtype)
                if grad_x is not None:
                    grad_x[part] = (grad @ w_VC).to(grad_x.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight[:vocabulary], grad, x, first=start == 0)
                del grad, logits_NV  # before the next chunk's product is made
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VC.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (scale,) = grad_outputs
        # scaled in place, so that autograd refuses a second backward
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x.mul_(scale.to(grad_x.dtype))
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None


def linear_cross_entropy(x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
    """Mean cross-entropy in nats, a scalar in float32 (float64 for float64 input), differentiable once.

    x_BTC: (..., C) hidden states; weight_VC: (V, C) head, of which the first `vocabulary` rows count;
    targets_BT: int64 of x's leading shape, -1 where a position is not scored.
    """
    loss: Tensor = _LinearCrossEntropy.apply(
        x_BTC.reshape(-1, x_BTC.shape[-1]), weight_VC, targets_BT.reshape(-1), vocabulary
    )
    return loss


@torch.no_grad()
def token_losses(x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
    """Cross-entropy of each position in nats: (...) of targets' shape, float32 (float64 for float64); -1 gives 0."""
    dtype = _compute_dtype(x_BTC)
    wide = torch.promote_types(dtype, torch.float32)
    x_NC, targets_N = x_BTC.reshape(-1, x_BTC.shape[-1]), targets_BT.reshape(-1)
    losses_N = torch.zeros(targets_N.shape, dtype=wide, device=x_BTC.device)
    scored = (targets_N != IGNORED).nonzero()[:, 0]  # the head is not applied where nothing is scored
    with torch.autocast(x_BTC.device.type, enabled=False):
        w_VC = weight_VC[:vocabulary].to(dtype)
        rows = _chunk_rows(x_BTC)
        for part in scored.split(rows):
            x = x_NC[part].to(dtype)
            logits_NV = product(x, w_VC) if onednn(x, HEAD_WIDE) else (x @ w_VC.T).to(wide)
            losses_N[part] = F.cross_entropy(logits_NV, targets_N[part], reduction="none")
    return losses_N.reshape(targets_BT.shape)
