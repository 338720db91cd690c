"""Linear head + cross-entropy without ever holding the (tokens, vocabulary) logits.

The rows are taken in chunks. Where gradients are wanted, each chunk's gradient is made at once, while its
logits exist, so backward only scales what is already there. The idea of fusing head and loss by chunks is
that of Liger Kernel (Hsu et al., 2024, arXiv:2410.10989) and of torchtune's chunked cross-entropy.

Padded vocabulary columns take part in neither the softmax nor the gradient. There are two ways to that end:

    float32 on a CPU   the head is cut to `vocabulary` rows; softmax and gradient in the memory of the logits
    everywhere else    the products are as wide as the padding, so that each row of logits begins where the matrix
                       units can read it at once; the padding is then set to -inf, which gives its gradient 0.
                       Between the products lies one function, `chunk_loss`, that torch.compile makes two passes of
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.model.cpu_linear import HEAD_WIDE, by_hand, onednn, product

CHUNK_ROWS = {"cpu": 256, "cuda": 4096}  # rows of logits alive at once; on two CPU cores 512 is no faster
# of those, the rows in float32 at once where `chunk_loss` is not compiled, by the bytes of a logit: a copy of few rows
# is small beside bfloat16 logits, and beside float32 ones, which are held anyway, it has to be smaller
WIDE_ROWS = {2: 1024, 4: 128, 8: 128}
IGNORED = -1

# logits_NV, targets_N, count, vocabulary -> sum of the losses; see chunk_loss
Chunk = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that the matrix products run in: autocast's where it is on, else the input's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What softmax and sums are in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _chunk_rows(x: Tensor) -> int:
    return CHUNK_ROWS.get(x.device.type, 512)


def _row_losses(logits_NV: Tensor, targets_N: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logits in the wide dtype, the log of each row's sum of exponentials (N, 1), and its loss (N, 1).

    The padding of logits_NV is overwritten. A row that is not scored has the loss 0.
    """
    column_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    wide_NV = logits_NV.masked_fill_(column_V >= vocabulary, -math.inf).to(_wide(logits_NV.dtype))
    largest_N1 = wide_NV.amax(-1, keepdim=True)
    log_total_N1 = (wide_NV - largest_N1).exp_().sum(-1, keepdim=True).log() + largest_N1
    at_target_N1 = wide_NV.gather(1, targets_N.clamp(min=0)[:, None])
    return wide_NV, log_total_N1, (log_total_N1 - at_target_N1) * (targets_N != IGNORED)[:, None]


def chunk_loss(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """Sum of a chunk's losses. Its logits, of any dtype, become their own gradient of that sum / count.

    Only elementwise operations and sums over rows, and no exponential that is used twice: what torch.compile fuses
    reads the logits and writes the gradient, and no float32 copy of them.
    """
    wide_NV, log_total_N1, losses_N1 = _row_losses(logits_NV, targets_N, vocabulary)
    hit_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == targets_N[:, None]
    share_N1 = (targets_N != IGNORED)[:, None] / count
    logits_NV.copy_(wide_NV.sub_(log_total_N1).exp_().add_(hit_NV, alpha=-1).mul_(share_N1))
    return losses_N1.sum()


def _some_rows(logits_NV: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """As many rows at once as may be copied to the wide dtype where nothing is fused."""
    rows = WIDE_ROWS[logits_NV.element_size()]
    return zip(logits_NV.split(rows), targets_N.split(rows), strict=True)


def chunk_loss_in_parts(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """chunk_loss where it is not compiled: in float32 are WIDE_ROWS rows at a time, not the whole chunk."""
    parts = [
        chunk_loss(logits, targets, count, vocabulary) for logits, targets in _some_rows(logits_NV, targets_N)
    ]
    return torch.stack(parts).sum()


class _CutHead:
    """Logits of one chunk after another, each in the memory of the last: fresh pages would cost more than a product.

    Of a CPU in float32 (gpt2.model.cpu_linear.by_hand), where the head w_VC has no padding.
    """

    def __init__(self, w_VC: Tensor, rows: int, wanted: bool) -> None:
        self.w_VC, self.rows, self.wanted = w_VC, rows, wanted  # wanted: the gradient
        self._buffer_NV: Tensor | None = None

    def logits(self, x: Tensor) -> Tensor:
        """x @ w_VC.T. The caller drops what it has of the chunk before."""
        if onednn(x, HEAD_WIDE):
            return product(
                x, self.w_VC
            )  # a heap that keeps its blocks (study.runner.child_process) gives it the last one's
        if self._buffer_NV is None:
            self._buffer_NV = torch.empty((self.rows, self.w_VC.shape[0]), dtype=x.dtype, device=x.device)
        return torch.mm(x, self.w_VC.T, out=self._buffer_NV[: x.shape[0]])

    def chunk_loss(self, logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
        """chunk_loss in the memory of the logits alone; without the gradient where nobody wants it."""
        kept_N = targets_N != IGNORED
        index_N1 = targets_N.clamp(min=0)[:, None]
        at_target_N1 = logits_NV.gather(1, index_N1)
        largest_N1 = logits_NV.amax(dim=-1, keepdim=True)
        logits_NV.sub_(largest_N1).exp_()
        total_N1 = logits_NV.sum(dim=-1, keepdim=True)
        loss = ((total_N1.log() + largest_N1 - at_target_N1)[:, 0] * kept_N).sum()
        if not self.wanted:
            return loss
        share_N1 = (kept_N / count)[:, None]
        logits_NV.mul_(share_N1 / total_N1).scatter_add_(1, index_N1, -share_N1)
        return loss


class _PaddedHead:
    """Logits as wide as the padding, w_VC with all its rows; `chunk_loss` may be compiled."""

    def __init__(self, w_VC: Tensor, chunk: Chunk) -> None:
        self.w_VC, self.chunk_loss = w_VC, chunk

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.w_VC.T


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
    def forward(
        ctx: Any, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, vocabulary: int, chunk: Chunk
    ) -> Tensor:
        dtype = compute_dtype(x_NC)
        wide, cut = _wide(dtype), by_hand(x_NC)
        need_x, need_weight = ctx.needs_input_grad[:2]
        count = (targets_N != IGNORED).sum().clamp(min=1).to(wide)
        loss = torch.zeros((), dtype=wide, device=x_NC.device)
        grad_x = torch.empty_like(x_NC) if need_x else None
        grad_weight = torch.empty_like(weight_VC, dtype=wide) if need_weight else None
        if grad_weight is not None:
            grad_weight[vocabulary:] = 0.0
        with torch.autocast(x_NC.device.type, enabled=False):
            w_VC = (weight_VC[:vocabulary] if cut else weight_VC).to(dtype)
            rows = min(_chunk_rows(x_NC), x_NC.shape[0])
            head = _CutHead(w_VC, rows, need_x or need_weight) if cut else _PaddedHead(w_VC, chunk)
            for start in range(0, x_NC.shape[0], rows):
                part = slice(start, start + rows)
                x, targets = x_NC[part].to(dtype), targets_N[part]
                logits_NV = head.logits(x)
                loss += head.chunk_loss(logits_NV, targets, count, vocabulary)
                grad_NV = logits_NV  # d loss / d logits = (softmax - onehot) / count, in place of the logits
                if grad_x is not None:
                    grad_x[part] = (grad_NV @ w_VC).to(grad_x.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight[: w_VC.shape[0]], grad_NV, x, first=start == 0)
                del grad_NV, logits_NV  # before the next chunk's product is made
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VC.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        # scaled in place, so that autograd refuses a second backward
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x.mul_(scale.to(grad_x.dtype))
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None


def linear_cross_entropy(
    x_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    vocabulary: int,
    chunk: Chunk = chunk_loss_in_parts,
) -> Tensor:
    """Mean cross-entropy in nats, a scalar in float32 (float64 for float64 input), differentiable once.

    x_BTC: (..., C) hidden states; weight_VC: (V, C) head, of which the first `vocabulary` rows count;
    targets_BT: int64 of x's leading shape, -1 where a position is not scored. chunk: chunk_loss, compiled, where the
    step is compiled; a CPU in float32 makes no use of it.
    """
    loss: Tensor = _LinearCrossEntropy.apply(
        x_BTC.reshape(-1, x_BTC.shape[-1]), weight_VC, targets_BT.reshape(-1), vocabulary, chunk
    )
    return loss


@torch.no_grad()
def token_losses(x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor, vocabulary: int) -> Tensor:
    """Cross-entropy of each position in nats: (...) of targets' shape, float32 (float64 for float64); -1 gives 0."""
    dtype, cut = compute_dtype(x_BTC), by_hand(x_BTC)
    x_NC, targets_N = x_BTC.reshape(-1, x_BTC.shape[-1]), targets_BT.reshape(-1)
    losses_N = torch.zeros(targets_N.shape, dtype=_wide(dtype), device=x_BTC.device)
    scored = (targets_N != IGNORED).nonzero()[:, 0]  # the head is not applied where nothing is scored
    with torch.autocast(x_BTC.device.type, enabled=False):
        w_VC = (weight_VC[:vocabulary] if cut else weight_VC).to(dtype)
        for part in scored.split(_chunk_rows(x_BTC)):
            x, targets = x_NC[part].to(dtype), targets_N[part]
            logits_NV = product(x, w_VC) if onednn(x) else x @ w_VC.T
            if cut:
                losses_N[part] = F.cross_entropy(logits_NV, targets, reduction="none")
                continue
            losses_N[part] = torch.cat(
                [_row_losses(*some, vocabulary)[2][:, 0] for some in _some_rows(logits_NV, targets)]
            )
            del logits_NV  # before the next chunk's product is made
    return losses_N.reshape(targets_BT.shape)
