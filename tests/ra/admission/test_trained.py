"""A trained model is examined on real windows: a leak that only training opened is found."""

import pytest
import torch
from torch import Tensor, nn

from gpt2.initial_weights import initialise
from gpt2.transformer import GPT2, CausalSelfAttention, ModelParts
from ra.admission.batches import examine_trained
from tests.ra.admission.leaking import uncausal


class Opened(CausalSelfAttention):
    """Leaks, couples sequences or branches on the mode once its gate has moved far."""

    def __init__(self, width: int, heads: int, dropout: float, kind: str) -> None:
        super().__init__(width, heads, dropout)
        self.kind, self.gate = kind, nn.Parameter(torch.zeros(()))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, amount = self.fused(q, k, v), torch.relu(self.gate - 1)
        if self.kind == "causal":
            return y + amount * uncausal(q, k, v)
        if self.kind == "batch":
            return y + amount * v.mean(0, keepdim=True) * torch.arange(len(v)).view(-1, 1, 1, 1)
        if self.kind == "mean":
            return y + amount * v.mean(0, keepdim=True)
        return y + amount * v * self.training


@pytest.mark.parametrize("kind", ["causal", "batch", "mean", "mode"])
@pytest.mark.parametrize("gate", [0.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_of_the_trained_model_is_named(kind: str, gate: float, dtype: str) -> None:
    model = GPT2(layers=2, heads=2, width=32, block_size=48, vocabulary=61, padded_vocabulary=64,
                 parts=ModelParts(attention=lambda layer: Opened(32, 2, 0.0, kind)))  # fmt: skip
    initialise(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):
            parameter.data.fill_(gate)
        if "attention" in name and name.endswith("weight"):
            parameter.data.mul_(10)
    ids = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        found = examine_trained(model, ids)
    check = "batch" if kind == "mean" else kind
    assert [fault.check for fault in found.faults] == ([check] if gate else [])
    assert not model.training
