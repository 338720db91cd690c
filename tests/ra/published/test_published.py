"""Each attention from the literature equals its formula, written with T x T matrices in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt2.config.config import ModelConfig
from gpt2.memory.allocation_tracker import AllocationTracker
from gpt2.model.init import initialise
from gpt2.model.transformer import GPT2, CausalSelfAttention
from gpt2.train.step import build_model
from ra.names import published_variants
from ra.settings import AlternationSettings
from ra.variants import variant

MODEL = ModelConfig("test", 3, 2, 16, 24, 0.0, vocabulary=101, padded_vocabulary=128)
C, H, W = MODEL.width, MODEL.heads, MODEL.block_size // 4
D = C // H


def model_of(name: str, config: ModelConfig = MODEL) -> GPT2:
    """The model in float64, every parameter far from its initial value."""
    chosen = variant(name, config, AlternationSettings("output", 0.5, 100.0))
    model = build_model(config, chosen.attention)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def heads(x_TC: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Project to one (T, D) tensor per head."""
    return list((x_TC @ weight.T + bias).split(D, dim=1))


def shares(q_TD: Tensor, k_TD: Tensor, scale: float, window: int = 10**6) -> Tensor:
    """Softmax over the seen positions, row by row."""
    T = len(q_TD)
    rows = []
    for i in range(T):
        first = max(0, i - window + 1)
        row = torch.softmax((k_TD[first : i + 1] @ q_TD[i]) * scale, 0)
        rows.append(torch.cat([row.new_zeros(first), row, row.new_zeros(T - i - 1)]))
    return torch.stack(rows)


def rms(x_TD: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x_TD / torch.sqrt((x_TD**2).mean(1, keepdim=True) + eps) * gain


def gated(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int) -> Tensor:
    return shares(q, k, 1 / math.sqrt(D)) @ v  # the gate is applied to all heads, below


def qknorm(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int) -> Tensor:
    q, k = rms(q, p["query_norm.weight"], 1e-6), rms(k, p["key_norm.weight"], 1e-6)
    return shares(q, k, 1 / math.sqrt(D)) @ v


def window(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int) -> Tensor:
    return shares(q, k, 1 / math.sqrt(D), W) @ v


def differential(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int) -> Tensor:
    a_1, b_1, a_2, b_2 = p["lambdas"]
    constant = 0.8 - 0.6 * math.exp(-0.3 * layer)
    share = (a_1 * b_1).sum().exp() - (a_2 * b_2).sum().exp() + constant
    half, scale = D // 2, (D // 2) ** -0.5
    first = shares(q[:, :half], k[:, :half], scale)
    second = shares(q[:, half:], k[:, half:], scale)
    return (1 - constant) * rms((first - share * second) @ v, p["norm.weight"], 1e-5)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "DIFFERENTIAL": differential,
    "GATED": gated,
    "QKNORM": qknorm,
    "WINDOW": window,
}


def reference(name: str, attention: nn.Module, x_TC: Tensor, layer: int) -> Tensor:
    p = dict(attention.named_parameters())
    parts = zip(p["qkv.weight"].split(C), p["qkv.bias"].split(C), strict=True)
    q, k, v = (heads(x_TC, weight, bias) for weight, bias in parts)
    y_TC = torch.cat([FORMULAS[name](q[h], k[h], v[h], p, layer) for h in range(H)], dim=1)
    if name == "GATED":
        y_TC = y_TC / (1 + torch.exp(-(x_TC @ p["gate.weight"].T + p["gate.bias"])))
    return y_TC @ p["proj.weight"].T + p["proj.bias"]


def test_every_published_attention_has_a_formula_here() -> None:
    assert published_variants() == sorted(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("T", [1, 5, W, W + 1, 2 * W, 23, 24])
def test_output_and_gradients_equal_the_formula(name: str, T: int) -> None:
    model = model_of(name)
    for layer, block in enumerate(model.blocks):
        x_BTC = torch.randn(2, T, C, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
        x_BTC.requires_grad_()
        inputs = [x_BTC, *block.attention.parameters()]
        expected = torch.stack([reference(name, block.attention, x_TC, layer) for x_TC in x_BTC])
        cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
        wanted = torch.autograd.grad(expected, inputs, cotangent)
        found = block.attention(x_BTC)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        for one, other in zip(torch.autograd.grad(found, inputs, cotangent), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_the_window_counts_the_pairs_of_positions_that_it_uses() -> None:
    attention = model_of("WINDOW").blocks[0].attention
    pairs = sum(min(i + 1, W) for i in range(MODEL.block_size))
    half_a_row = MODEL.block_size / 2  # of the pairs (i, i), half is counted
    assert abs(attention.attention_calls * MODEL.block_size**2 / 2 - pairs) <= half_a_row


def test_the_window_stores_no_matrix_of_all_positions() -> None:
    peaks = []
    for size in (256, 512, 1024):
        config = ModelConfig("test", 1, 2, 16, size, 0.0, vocabulary=101, padded_vocabulary=128)
        attention = model_of("WINDOW", config).float().blocks[0].attention
        assert isinstance(attention, CausalSelfAttention)
        attention.window = 32
        tracker = AllocationTracker()
        with tracker, tracker.phase("step"):
            attention(torch.randn(1, size, 16, requires_grad=True)).sum().backward()
        peaks.append(tracker.timeline().peak_bytes())
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.05)
