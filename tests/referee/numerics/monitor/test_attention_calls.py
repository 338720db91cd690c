"""Entropy and largest logit of attention calls equal those of whole score matrices, in blocks of any size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from referee.numerics.monitor import activations
from referee.numerics.monitor.activations import AttentionCalls, attention_statistics

DRAW = torch.Generator().manual_seed(0)


def failed(error: Exception) -> None:
    raise error


def whole(query: Tensor, key: Tensor, hidden: Tensor | None, added: Any, scale: float) -> tuple[float, float]:
    """All scores at once, in float64."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.double() @ key.double().transpose(-1, -2) * scale + added
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    probabilities = scores.softmax(-1).nan_to_num(0.0)
    entropy = -(probabilities * probabilities.clamp_min(1e-300).log()).sum(-1)
    return float(entropy.mean()), float(scores.max())


@pytest.mark.parametrize("block", [1, 50])
@pytest.mark.parametrize("case", ["plain", "causal", "mask", "empty row", "bias", "scale", "grouped"])
def test_statistics_are_those_of_the_whole_matrix(
    case: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(activations.BLOCK, "cpu", block)
    query = torch.randn(2, 4, 9, 8, generator=DRAW) * 3
    key = torch.randn(2, 2 if case == "grouped" else 4, 9, 8, generator=DRAW)
    scale, mask, hidden, added = 8**-0.5, None, None, 0.0
    if case == "causal":
        hidden = torch.ones(9, 9).triu(1).bool()
    elif case in ("mask", "empty row"):
        mask = torch.rand(2, 1, 9, 9, generator=DRAW) > 0.4
        mask[..., 0] = True
        if case == "empty row":
            mask[:, :, 3] = False
        hidden = ~mask
    elif case == "bias":
        mask = torch.randn(4, 9, 9, generator=DRAW)
        added = mask.double()
    elif case == "scale":
        scale = 2.0
    found = attention_statistics(query, key, mask, case == "causal", scale if case == "scale" else None)
    assert found[:2].tolist() == pytest.approx(whole(query, key, hidden, added, scale), rel=1e-4, abs=1e-5)
    assert found[2] == 2 * 4 * 9


def test_a_wrapped_attention_is_observed_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seed_all wraps it: a monitor without rows would look like a model without attention."""
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **options: attention(*args, **options)
    )
    x = torch.randn(1, 2, 5, 4, generator=DRAW)
    seen: list[Tensor] = []
    plain = F.scaled_dot_product_attention(x, x, x)
    with AttentionCalls(seen.append, lambda: True, failed):
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), plain)
    assert [found[2].item() for found in seen] == [2 * 5]
