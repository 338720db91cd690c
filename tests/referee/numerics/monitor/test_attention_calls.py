"""Entropy and largest logit of attention calls equal those of whole score matrices, in blocks of any size."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


MASKS = ["none", "causal", "padding", "added"]


@pytest.mark.parametrize(
    ("mask", "way"),
    [
        *itertools.product(MASKS, ["eager"]),
        ("causal", "compiled"),
    ],
)
def test_attention_within_multihead_attention_is_seen_once_and_changes_nothing(mask: str, way: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, dropout=0.2, batch_first=True)
    x = torch.randn(2, 5, 16) * 3
    given: dict[str, Any] = {
        "none": {},
        "causal": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
        "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
        "added": {"attn_mask": torch.randn(8, 5, 5)},
    }[mask]
    probabilities = layer.eval()(x, x, x, average_attn_weights=False, **given)[1].detach()
    called = torch.compile(layer, backend="aot_eager") if way == "compiled" else layer
    called.train()

    def run() -> Tensor:
        torch.manual_seed(1)
        found: Tensor = called(x, x, x, need_weights=False, **given)[0]
        return found

    seen: list[Tensor] = []
    plain = run()
    with AttentionCalls(seen.append, lambda: True, failed):
        observed = run()
    assert torch.equal(observed, plain)
    assert len(seen) == 1
    entropy = -(probabilities * probabilities.clamp_min(1e-30).log()).sum(-1).mean()
    assert float(seen[0][0]) == pytest.approx(float(entropy), rel=1e-4)
    assert seen[0][2] == 2 * 4 * 5
