"""Each attention from the literature equals its formula, written with T x T matrices in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpt2.allocation_tracker import AllocationTracker
from gpt2.initial_weights import initialise
from gpt2.training_step import build_model
from gpt2.transformer import GPT2, CausalSelfAttention
from ra.arms import published_variants
from ra.variants import variant
from runtime.settings import AlternationSettings, ModelConfig

MODEL = ModelConfig("test", 3, 2, 16, 24, 0.0, vocabulary=101, padded_vocabulary=128)
C, H, W = MODEL.width, MODEL.heads, MODEL.block_size // 4
D = C // H


def model_of(name: str, config: ModelConfig = MODEL) -> GPT2:
    """The model in float64, every parameter far from its initial value."""
    chosen = variant(name, config, AlternationSettings("output", 0.5, 100.0))
    model = build_model(config, chosen.parts)
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


def standard(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int, head: int) -> Tensor:
    return shares(q, k, 1 / math.sqrt(D)) @ v


def qknorm(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int, head: int) -> Tensor:
    q, k = rms(q, p["query_norm.weight"], 1e-6), rms(k, p["key_norm.weight"], 1e-6)
    return shares(q, k, 1 / math.sqrt(D)) @ v


def window(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int, head: int) -> Tensor:
    return shares(q, k, 1 / math.sqrt(D), W) @ v


def differential(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int, head: int) -> Tensor:
    a_1, b_1, a_2, b_2 = p["lambdas"]
    constant = 0.8 - 0.6 * math.exp(-0.3 * layer)
    share = (a_1 * b_1).sum().exp() - (a_2 * b_2).sum().exp() + constant
    half, scale = D // 2, (D // 2) ** -0.5
    first = shares(q[:, :half], k[:, :half], scale)
    second = shares(q[:, half:], k[:, half:], scale)
    return (1 - constant) * rms((first - share * second) @ v, p["norm.weight"], 1e-5)


def double(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int, head: int) -> Tensor:
    return shares(q, k, 1 / math.sqrt(D)) @ v + shares(k, q, 1 / math.sqrt(D)) @ v


def lens(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int, head: int) -> Tensor:
    w_std, w_rec, w_disc = p["gates"][head].exp() / p["gates"][head].exp().sum()
    scores = q @ k.T / math.sqrt(D)
    discoverability = k @ p["u"][head]
    # the source subtracts the mean over all positions, which no row of the softmax sees
    column = discoverability - discoverability.mean()
    mixed = w_std * scores + w_rec * scores.T + w_disc * column
    future = torch.ones(len(q), len(q)).triu(1) > 0
    return torch.softmax(mixed.masked_fill(future, -math.inf), 1) @ v


def valueres(q: Tensor, k: Tensor, v: Tensor, p: dict[str, Tensor], layer: int, head: int) -> Tensor:
    share = (
        p["lambdas"].sum() if layer else 1.0
    )  # alone, a layer's values are those of the first layer as well
    return shares(q, k, 1 / math.sqrt(D)) @ (share * v)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "DIFFERENTIAL": differential,
    "DOUBLE": double,
    "GATED": standard,
    "LENS": lens,
    "QKNORM": qknorm,
    "RABETA": standard,
    "VALUERES": valueres,
    "WINDOW": window,
}
OTHER_PARTS = {"NOPE", "RMS", "ROTARY", "SWIGLU"}  # test_parts.py


def reference(name: str, attention: nn.Module, x_TC: Tensor, layer: int) -> Tensor:
    p = dict(attention.named_parameters())
    parts = zip(p["qkv.weight"].split(C), p["qkv.bias"].split(C), strict=True)
    q, k, v = (heads(x_TC, weight, bias) for weight, bias in parts)
    y_TC = torch.cat([FORMULAS[name](q[h], k[h], v[h], p, layer, h) for h in range(H)], dim=1)
    if name == "GATED":
        y_TC = y_TC / (1 + torch.exp(-(x_TC @ p["gate.weight"].T + p["gate.bias"])))
    if name == "RABETA":
        last = shares(k[-1], q[-1], 1 / math.sqrt(D)) @ v[-1]
        r_TC = last @ p["reciprocal.weight"].T + p["reciprocal.bias"]
        centred = r_TC - r_TC.mean(1, keepdim=True)
        normed = centred / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-5)
        y_TC = y_TC + torch.tanh(p["logit"]) * (normed * p["norm.weight"] + p["norm.bias"])
    return y_TC @ p["proj.weight"].T + p["proj.bias"]


def test_every_published_attention_has_a_formula_here() -> None:
    assert published_variants() == sorted({*FORMULAS, *OTHER_PARTS})


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("T", [1, W, W + 1, 23])
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


@pytest.mark.parametrize("name", FORMULAS)
def test_no_matrix_of_all_positions_is_stored(name: str) -> None:
    peaks = []
    for size in (256, 512, 1024):
        config = ModelConfig("test", 2, 2, 16, size, 0.0, vocabulary=101, padded_vocabulary=128)
        attention = model_of(name, config).float().blocks[1].attention
        assert isinstance(attention, CausalSelfAttention)
        if name == "WINDOW":
            attention.window = 32
        tracker = AllocationTracker()
        with tracker, tracker.phase("step"):
            attention(torch.randn(1, size, 16, requires_grad=True)).sum().backward()
        peaks.append(tracker.timeline().peak_bytes())
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.05)
