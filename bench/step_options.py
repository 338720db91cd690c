"""Options of a training step on a GPU that are no default yet: `make bench CASES="B@64 B+chunk32k@64 B+bf16@64"`.

Each is a suffix of a case. They change the worker's process, which runs one case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gpt2 import loss
from gpt2.training_step import Stepper
from runtime.errors import UserError


def apply_options(stepper: Stepper, case: str) -> None:
    """Apply the options of a case before its first step. UserError for an unknown option."""
    for name in (suffix for suffix in case.split("+")[1:] if "=" not in suffix):  # the others are modifiers
        if name not in OPTIONS:
            raise UserError(f"{case}: unknown option {name!r}; options: {', '.join(OPTIONS)}")
        OPTIONS[name](stepper)


def head_chunk(rows: int, stepper: Stepper) -> None:
    """Hold logits of so many rows at once: larger products, more memory."""
    loss.CHUNK_ROWS["cpu" if stepper.device == "cpu" else "card"] = rows


def float32_product(stepper: Stepper) -> None:
    """Write the head's weight gradient as float32 from the product itself, without a bfloat16 copy."""

    def add_product(total_VC: Tensor, grad_NV: Tensor, x_NC: Tensor, first: bool) -> None:
        part_VC = torch.mm(grad_NV.T, x_NC, out_dtype=total_VC.dtype)
        total_VC.copy_(part_VC) if first else total_VC.add_(part_VC)

    loss._add_product = add_product


def gather_first(stepper: Stepper) -> None:
    """Read the target logits before the compiled part of the loss, which then has no indirect access.

    So softmax and gradient can be one kernel that overwrites the logits.
    """
    compiled = torch.compile(softmax_gradient)

    def chunk(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
        target_logit_N1 = logits_NV.gather(1, targets_N.clamp(min=0)[:, None])
        log_sum_N1 = compiled(logits_NV, targets_N, count, vocabulary)
        return ((log_sum_N1 - target_logit_N1)[:, 0] * (targets_N != loss.IGNORED)).sum()

    stepper.loss = functools.partial(loss.linear_cross_entropy, chunk=chunk)


def softmax_gradient(logits_NV: Tensor, targets_N: Tensor, count: Tensor, vocabulary: int) -> Tensor:
    """Overwrite logits as loss.chunk_loss does. Return each row's log-sum-exp (N, 1), float32."""
    column_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    float_NV = logits_NV.float().masked_fill(column_V >= vocabulary, float("-inf"))
    log_sum_N1 = float_NV.logsumexp(-1, keepdim=True)
    onehot_NV = column_V == targets_N[:, None]
    weight_N1 = (targets_N != loss.IGNORED)[:, None] / count
    logits_NV.copy_(((float_NV - log_sum_N1).exp() - onehot_NV.float()) * weight_N1)
    return log_sum_N1


def bfloat16_residual(stepper: Stepper) -> None:
    """Store the residual stream and the final norm's output in bfloat16. This changes the loss by rounding."""
    model = stepper.model
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: (inputs[0].bfloat16(),))
    model.norm.register_forward_hook(lambda norm, inputs, output: output.bfloat16())


OPTIONS: dict[str, Callable[[Stepper], None]] = {
    "chunk16k": functools.partial(head_chunk, 16_384),
    "chunk32k": functools.partial(head_chunk, 32_768),
    "f32grad": float32_product,
    "gather": gather_first,
    "bf16": bfloat16_residual,
}
