"""Linear head and cross-entropy without holding the full (tokens, vocabulary) logits.

Rows are processed in chunks. Where gradients are needed, forward computes each chunk's gradient while its logits
exist, and backward only scales the result. Fusing head and loss by chunks is the idea of Liger Kernel (Hsu et al.,
2024, arXiv:2410.10989) and of torchtune's chunked cross-entropy.

Padded vocabulary columns enter neither the softmax nor the gradient:

    float32 on a CPU   the head is sliced to `vocabulary` rows; softmax and gradient overwrite the logits
    everywhere else    products keep the padded width, so that each row of logits starts at an aligned address; the
                       padding is then set to -inf, so its gradient is 0. `chunk_loss`, the only function between the
                       products, compiles to two passes over the logits
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad  # a later change of torch's name has no effect

from gpt2.cpu_linear import MIN_HEAD_WIDTH, onednn_matmul, use_cpu_kernels, use_onednn

CHUNK_ROWS = {"cpu": 256, "card": 4096}  # rows of logits held at once; 512 is no faster on two CPU cores
# rows converted to float32 at once where `chunk_loss` is not compiled, by bytes of a logit. A copy of few rows is small
# beside bfloat16 logits; beside float32 logits it must be smaller
FLOAT32_ROWS = {2: 1024, 4: 128, 8: 128}
IGNORED = -1  # target of a position that is not scored

# (x_BTC, weight_VC, targets_BT, vocabulary) -> mean loss; see linear_cross_entropy
Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]
# (logits_NV, targets_N, vocabulary) -> loss of each row (N,); see target_losses
RowLosses = Callable[[Tensor, Tensor, int], Tensor]
# (logits_NV, targets_N, count, vocabulary) -> sum of the losses; see chunk_loss
ChunkLoss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products: autocast's where it is enabled, else the input's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def chunk_rows(device_type: str) -> int:
    """Return the rows of logits held at once on a type of device."""
    return CHUNK_ROWS["cpu" if device_type == "cpu" else "card"]


def _row_losses(logits_NV: Tensor, targets_N: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the logits in the sum dtype, each row's log-sum-exp (N, 1) and each row's loss (N, 1).

    Overwrites the padding of logits_NV. A row that is not scored has loss 0.
    """
    column_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    float_NV = logits_NV.masked_fill_(column_V >= vocabulary, -math.inf).to(sum_dtype(logits_NV.dtype))
    max_N1 = float_NV.amax(-1, keepdim=True)
    log_sum_N1 = (float_NV - max_N1).exp_().sum(-1, keepdim=True).log() + max_N1
    # a gather here would be compiled wrongly by torch 2.11: it reads the logits after the gradient has replaced them
    is_target_NV = column_V == targets_N[:, None]
    target_logit_N1 = float_NV.where(is_target_NV, 0).sum(-1, keepdim=True)  # exact: the other terms are 0
    return float_NV, log_sum_N1, (log_sum_N1 - target_logit_N1) * (targets_N != IGNORED)[:, None]


def chunk_loss(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """Sum a chunk's losses and overwrite its logits, of any dtype, with the gradient of sum / count.

    Uses elementwise operations and row sums only, and no exponential twice. So torch.compile fuses it to kernels that
    read the logits and write the gradient, without a float32 copy.
    """
    float_NV, log_sum_N1, losses_N1 = _row_losses(logits_NV, targets_N, vocabulary)
    onehot_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == targets_N[:, None]
    weight_N1 = (targets_N != IGNORED)[:, None] / count
    logits_NV.copy_(float_NV.sub_(log_sum_N1).exp_().add_(onehot_NV, alpha=-1).mul_(weight_N1))
    return losses_N1.sum()


def _row_slices(logits_NV: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split logits and targets into slices of FLOAT32_ROWS rows."""
    rows = FLOAT32_ROWS[logits_NV.element_size()]
    return zip(logits_NV.split(rows), targets_N.split(rows), strict=True)


def chunk_loss_sliced(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """Compute chunk_loss in slices, for eager mode: only one slice is copied to float32 at a time."""
    parts = [
        chunk_loss(logits, targets, count, vocabulary)
        for logits, targets in _row_slices(logits_NV, targets_N)
    ]
    return torch.stack(parts).sum()


def target_losses(logits_NV: Tensor, targets_N: Tensor, vocabulary: int) -> Tensor:
    """Compute each row's loss (N,) in the sum dtype; 0 where it is not scored. Compiled, it reads the logits once."""
    column_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    float_NV = logits_NV.to(sum_dtype(logits_NV.dtype)).masked_fill(column_V >= vocabulary, -math.inf)
    target_N = float_NV.where(column_V == targets_N[:, None], 0).sum(-1)  # no gather: see _row_losses
    return (float_NV.logsumexp(-1) - target_N) * (targets_N != IGNORED)


def target_losses_sliced(logits_NV: Tensor, targets_N: Tensor, vocabulary: int) -> Tensor:
    """Compute target_losses in slices, for eager mode. Overwrites the padding of the logits."""
    slices = _row_slices(logits_NV, targets_N)
    return torch.cat([_row_losses(*rows, vocabulary)[2][:, 0] for rows in slices])


def _chunk_loss_on_cpu(logits_NV: Tensor, targets_N: Tensor, count: Tensor, need_gradient: bool) -> Tensor:
    """Compute chunk_loss of logits without padding and without further memory of their size, in float32 on a CPU."""
    scored_N = targets_N != IGNORED
    index_N1 = targets_N.clamp(min=0)[:, None]
    target_logit_N1 = logits_NV.gather(1, index_N1)
    max_N1 = logits_NV.amax(dim=-1, keepdim=True)
    logits_NV.sub_(max_N1).exp_()
    sum_N1 = logits_NV.sum(dim=-1, keepdim=True)
    if need_gradient:
        weight_N1 = (scored_N / count)[:, None]
        logits_NV.mul_(weight_N1 / sum_N1).scatter_add_(1, index_N1, -weight_N1)
    return ((sum_N1.log() + max_N1 - target_logit_N1)[:, 0] * scored_N).sum()


def even_rows(count: int, rows: int) -> int:
    """Return the rows of a chunk, at most `rows`, where `count` rows have as few chunks as possible, of one size."""
    return -(-count // -(-count // rows))


def _add_product(total_VC: Tensor, grad_NV: Tensor, x_NC: Tensor, first: bool, direct: bool) -> None:
    """Compute total_VC += grad_NV.T @ x_NC (= the first time). No temporary where the dtypes agree.

    direct: a product of other dtype has the total's dtype, and is not rounded to that of the factors before.
    """
    if grad_NV.dtype != total_VC.dtype:
        part_VC = torch.mm(grad_NV.T, x_NC, out_dtype=total_VC.dtype) if direct else grad_NV.T @ x_NC
        total_VC.copy_(part_VC) if first else total_VC.add_(part_VC)
    elif first:
        torch.mm(grad_NV.T, x_NC, out=total_VC)
    else:
        total_VC.addmm_(grad_NV.T, x_NC)


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of x_NC @ weight_VC.T against targets_N. Forward computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        targets_N: Tensor,
        vocabulary: int,
        chunk: ChunkLoss,
        rows: int,
        even: bool,
    ) -> Tensor:
        dtype = compute_dtype(x_NC)
        total_dtype, unpadded = sum_dtype(dtype), use_cpu_kernels(x_NC)
        need_x, need_weight = ctx.needs_input_grad[:2]
        count = (targets_N != IGNORED).sum().clamp(min=1).to(total_dtype)
        loss = torch.zeros((), dtype=total_dtype, device=x_NC.device)
        grad_x = torch.empty_like(x_NC) if need_x else None
        grad_weight = torch.empty_like(weight_VC, dtype=total_dtype) if need_weight else None
        if grad_weight is not None:
            grad_weight[vocabulary:] = 0.0
        rows = even_rows(x_NC.shape[0], rows) if even else rows
        with torch.autocast(x_NC.device.type, enabled=False):
            w_VC = (weight_VC[:vocabulary] if unpadded else weight_VC).to(dtype)
            for start in range(0, x_NC.shape[0], rows):
                part = slice(start, start + rows)
                x, targets = x_NC[part].to(dtype), targets_N[part]
                missing = rows - len(targets) if even else 0
                if missing:  # the compiled chunk sees one shape
                    x, targets = pad(x, (0, 0, 0, missing)), pad(targets, (0, missing), value=IGNORED)
                logits_NV = onednn_matmul(x, w_VC) if use_onednn(x, MIN_HEAD_WIDTH) else x @ w_VC.T
                if unpadded:
                    loss += _chunk_loss_on_cpu(logits_NV, targets, count, need_x or need_weight)
                else:
                    loss += chunk(logits_NV, targets, count, vocabulary)
                grad_NV = logits_NV  # overwritten with d loss / d logits = (softmax - onehot) / count
                if grad_x is not None:
                    grad_x[part] = (grad_NV @ w_VC)[: rows - missing].to(grad_x.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight[: w_VC.shape[0]], grad_NV, x, first=start == 0, direct=even)
                del grad_NV, logits_NV  # before the next chunk's product
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VC.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        # scaling in place makes autograd refuse a second backward
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x.mul_(scale.to(grad_x.dtype))
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None, None


def linear_cross_entropy(
    x_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    vocabulary: int,
    chunk: ChunkLoss = chunk_loss_sliced,
    rows: int = 0,
    even: bool = False,
) -> Tensor:
    """Compute the mean cross-entropy in nats: a float32 scalar (float64 for float64 input), differentiable once.

    x_BTC: (..., C) hidden states. weight_VC: (V, C) head; only the first `vocabulary` rows count.
    targets_BT: int64 of x's leading shape, -1 where a position is not scored.
    chunk: the compiled chunk_loss where the step is compiled. Not used for float32 on a CPU.
    rows: of logits held at once; 0: those of the device. even: chunks have one size, whatever the number of rows, and
    the products of the weight's gradient are added in float32; see `fast_loss`.
    """
    x_NC = x_BTC.reshape(-1, x_BTC.shape[-1])
    rows = rows or chunk_rows(x_BTC.device.type)
    targets_N = targets_BT.reshape(-1)
    loss: Tensor = _LinearCrossEntropy.apply(x_NC, weight_VC, targets_N, vocabulary, chunk, rows, even)
    return loss


@torch.no_grad()
def token_losses(
    x_BTC: Tensor,
    weight_VC: Tensor,
    targets_BT: Tensor,
    vocabulary: int,
    rows: int = 0,
    losses_of: RowLosses = target_losses_sliced,
) -> Tensor:
    """Compute each position's cross-entropy in nats, in targets' shape, float32 (float64 for float64); -1 gives 0.

    rows: as for linear_cross_entropy. losses_of: target_losses where it is compiled. Not used for float32 on a CPU.
    """
    dtype, unpadded = compute_dtype(x_BTC), use_cpu_kernels(x_BTC)
    x_NC, targets_N = x_BTC.reshape(-1, x_BTC.shape[-1]), targets_BT.reshape(-1)
    losses_N = torch.zeros(targets_N.shape, dtype=sum_dtype(dtype), device=x_BTC.device)
    scored = (targets_N != IGNORED).nonzero()[:, 0]  # apply the head to scored positions only
    with torch.autocast(x_BTC.device.type, enabled=False):
        w_VC = (weight_VC[:vocabulary] if unpadded else weight_VC).to(dtype)
        for part in scored.split(rows or chunk_rows(x_BTC.device.type)):
            x, targets = x_NC[part].to(dtype), targets_N[part]
            logits_NV = onednn_matmul(x, w_VC) if use_onednn(x) else x @ w_VC.T
            if unpadded:
                losses_N[part] = cross_entropy(logits_NV, targets, reduction="none")
                continue
            losses_N[part] = losses_of(logits_NV, targets, vocabulary)
            del logits_NV  # before the next chunk's product
    return losses_N.reshape(targets_BT.shape)


# The loss of a compiled step on a card: larger chunks of one shape, and softmax and gradient in one kernel. It computes
# what the loss above computes; only the rounding of the weight's gradient differs. A card on which its result does not
# agree with that of eager code takes the compiled `chunk_loss`: see gpt2.training_step.compiled_loss.


CARD_ROWS = 32_768  # of logits held at once: 3.1 GiB of GPT-2's in bfloat16


def softmax_gradient(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """Overwrite the logits as chunk_loss does. Return each row's log-sum-exp (N, 1) in the sum dtype.

    It reads no single logit, so that torch.compile can make one kernel of it.
    """
    column_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    float_NV = logits_NV.to(sum_dtype(logits_NV.dtype)).masked_fill(column_V >= vocabulary, float("-inf"))
    log_sum_N1 = float_NV.logsumexp(-1, keepdim=True)
    onehot_NV = (column_V == targets_N[:, None]).to(float_NV.dtype)
    weight_N1 = (targets_N != IGNORED)[:, None] / count
    logits_NV.copy_(((float_NV - log_sum_N1).exp() - onehot_NV) * weight_N1)
    return log_sum_N1


def gathered_chunk(
    softmax: ChunkLoss, logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int
) -> Tensor:
    """Compute chunk_loss by `softmax`, softmax_gradient compiled or not. The targets' logits are read before."""
    target_N1 = logits_NV.gather(1, targets_N.clamp(min=0)[:, None])
    log_sum_N1 = softmax(logits_NV, targets_N, count, vocabulary)
    return ((log_sum_N1 - target_N1)[:, 0] * (targets_N != IGNORED)).sum()


def fast_loss() -> Loss:
    """Return linear_cross_entropy in the faster way, which the first call compiles."""
    chunk = functools.partial(gathered_chunk, torch.compile(softmax_gradient))
    return functools.partial(linear_cross_entropy, chunk=chunk, rows=CARD_ROWS, even=True)


def standard_loss() -> Loss:
    """Return linear_cross_entropy with the compiled chunk_loss."""
    return functools.partial(linear_cross_entropy, chunk=torch.compile(chunk_loss))
