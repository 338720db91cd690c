"""The loss of a compiled step on a card: larger chunks, and softmax and gradient in one kernel.

It computes what gpt2.loss computes; only the rounding of the weight's gradient differs. A card on which its result does
not agree with that of eager code takes the compiled `chunk_loss` instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gpt2.loss import (
    IGNORED,
    ChunkLoss,
    Loss,
    RowLosses,
    chunk_loss,
    even_rows,
    linear_cross_entropy,
    sum_dtype,
    target_losses,
    target_losses_sliced,
)
from runtime.errors import one_line, out_of_memory

ROWS = 32_768  # of logits held at once: 3.1 GiB of GPT-2's in bfloat16
LOSS_LIMIT = 2e-3  # nats
ROW_LIMIT = 1e-3  # nats of a row, from the same logits
ROWS_COMPARED = 256
GRADIENT_LIMIT = 0.02  # distance from that of eager code, in its length; bfloat16 rounds to 0.004


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
    return functools.partial(linear_cross_entropy, chunk=chunk, rows=ROWS, even=True)


def standard_loss() -> Loss:
    """Return linear_cross_entropy with the compiled chunk_loss."""
    return functools.partial(linear_cross_entropy, chunk=torch.compile(chunk_loss))


@functools.cache
def compiled_loss(
    device: str, dtype: torch.dtype, rows: int, width: int, padded: int, vocabulary: int
) -> tuple[Loss, str]:
    """Return the loss of a step on a card, and why it is not the faster one, if so. Compares them once.

    rows: of a micro-batch. width, padded: of the head.
    """
    fast = fast_loss()
    reason = disagreement(fast, device, dtype, even_rows(rows, ROWS), width, padded, vocabulary)
    return (standard_loss(), f"the standard head is used: {reason}") if reason else (fast, "")


def disagreement(
    fast: Loss, device: str, dtype: torch.dtype, rows: int, width: int, padded: int, vocabulary: int
) -> str:
    """Compare a loss with that of eager code on random rows; return how it differs, "" where it agrees."""
    draw = torch.Generator().manual_seed(0)
    x_NC = torch.randn(rows, width, generator=draw).to(device)
    weight_VC = (torch.randn(padded, width, generator=draw) / width**0.5).to(device)
    targets_N = torch.randint(vocabulary, (rows,), generator=draw).to(device)
    found = []
    try:
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            for loss in (fast, linear_cross_entropy):
                leaves = [part.detach().requires_grad_() for part in (x_NC, weight_VC)]
                value = loss(leaves[0], leaves[1], targets_N, vocabulary)
                found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return one_line(error)
    (value, *gradients), (exact, *exact_gradients) = found
    pairs = zip(gradients, exact_gradients, strict=True)
    distances = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    off = abs(float(value - exact))
    if off <= LOSS_LIMIT and max(distances) <= GRADIENT_LIMIT:  # false for NaN
        return ""
    return f"the faster one differs by {off:.1e} nats, its gradients by {max(distances):.1e}"


@functools.cache
@torch.no_grad()
def compiled_row_losses(
    device: str, dtype: torch.dtype, padded: int, vocabulary: int
) -> tuple[RowLosses, str]:
    """Return target_losses for an evaluation on a card, compiled for any number of rows if that is right there.

    Also returns why they are not compiled, or "".
    """
    compiled = torch.compile(target_losses, dynamic=True)
    draw = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(ROWS_COMPARED, padded, generator=draw).to(device, dtype)
    targets_N = torch.randint(vocabulary, (ROWS_COMPARED,), generator=draw).to(device)
    try:
        found_N = compiled(logits_NV, targets_N, vocabulary)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return target_losses_sliced, f"losses of evaluations are not compiled: {one_line(error)}"
    off = float((found_N - target_losses_sliced(logits_NV, targets_N, vocabulary)).abs().max())
    if off <= ROW_LIMIT:  # false for NaN
        return compiled, ""
    return (
        target_losses_sliced,
        f"losses of evaluations are not compiled: compiled, one differs by {off:.1e} nats",
    )
