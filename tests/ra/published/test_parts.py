"""Norms, MLPs, positions and value residuals of the literature equal their formulas, written out in float64."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from gpt2.initial_weights import initialise
from gpt2.optimizer import parameter_groups
from gpt2.sampling import Cache, logits
from gpt2.training_step import build_model
from gpt2.transformer import GPT2
from ra.arms import published_variants
from ra.attention_maps import layer_maps, queries_and_keys
from ra.published.rotary import RotaryPosition
from ra.variants import variant
from runtime.settings import AlternationSettings, ModelConfig

MODEL = ModelConfig("test", 3, 2, 16, 24, 0.0, vocabulary=101, padded_vocabulary=128)
ALTERNATION = AlternationSettings("output", 0.3, 100.0)
MIXES = {
    "output": ALTERNATION,
    "output, recomputed": AlternationSettings("output", 0.3, 100.0, recompute=True),
    "score": AlternationSettings("score", 0.3, 100.0),
    "hard": AlternationSettings("hard", 0.8, 100.0),
    "hard, every 2": AlternationSettings("hard", 0.8, 100.0, gate_every=2),
}
ROTARY = "+POSITION=rotary"
ARMS = [*published_variants(), "B+NORM=rms+MLP=swiglu+POSITION=rotary", "VALUERES+NORM=rms" + ROTARY]


def model_of(name: str, settings: AlternationSettings = ALTERNATION) -> GPT2:
    """Build an arm in float64, every parameter far from its initial value."""
    model = build_model(MODEL, variant(name, MODEL, settings).parts)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def turned(x_TD: Tensor) -> Tensor:
    """Rotate each pair of channels as a complex number by position x rate."""
    T, D = x_TD.shape
    pairs = torch.complex(x_TD[:, 0::2], x_TD[:, 1::2])
    for t in range(T):
        for m in range(D // 2):
            angle = torch.tensor(t * 10000.0 ** (-2 * m / D), dtype=torch.float64)
            pairs[t, m] = pairs[t, m] * torch.exp(1j * angle)
    return torch.view_as_real(pairs).flatten(1)


class Written:
    """A model written out for one sequence: rotation, RMSNorm, SwiGLU and value residual where its name has them."""

    def __init__(self, name: str, model: GPT2) -> None:
        self.name, self.p = name.lower(), dict(model.named_parameters())

    def norm(self, prefix: str, x: Tensor) -> Tensor:
        gain = self.p[f"{prefix}.weight"]
        if "rms" in self.name:
            return x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain
        centred = x - x.mean(1, keepdim=True)
        scale = (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * gain + self.p[f"{prefix}.bias"]

    def linear(self, prefix: str, x: Tensor) -> Tensor:
        return x @ self.p[f"{prefix}.weight"].T + self.p[f"{prefix}.bias"]

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        if "swiglu" not in self.name:
            z = self.linear(f"{prefix}.fc", x)
            inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
            return self.linear(f"{prefix}.proj", 0.5 * z * (1 + torch.tanh(inner)))
        both = self.linear(f"{prefix}.gate_up", x)
        one, three = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        return self.linear(f"{prefix}.proj", one / (1 + torch.exp(-one)) * three)

    def hidden(self, ids_T: Tensor) -> Tensor:
        T, heads, C = len(ids_T), MODEL.heads, MODEL.width
        D = C // heads
        x = self.p["token.weight"][ids_T]
        if not {"rotary", "nope"} & {*re.split(r"\W", self.name)}:
            x = x + self.p["position.weight"][:T]
        first: Tensor | None = None
        for layer in range(MODEL.layers):
            block = f"blocks.{layer}"
            q, k, v = self.linear(f"{block}.attention.qkv", self.norm(f"{block}.norm1", x)).split(C, 1)
            first = v if first is None else first
            if "valueres" in self.name and layer:
                one, two = self.p[f"{block}.attention.lambdas"]
                v = one * first + two * v
            outputs = []
            for h in range(heads):
                part = slice(h * D, (h + 1) * D)
                qh, kh = q[:, part], k[:, part]
                if "rotary" in self.name:
                    qh, kh = turned(qh), turned(kh)
                scores = (qh @ kh.T / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1) > 0, -math.inf)
                outputs.append(scores.softmax(1) @ v[:, part])
            x = x + self.linear(f"{block}.attention.proj", torch.cat(outputs, 1))
            x = x + self.mlp(f"{block}.mlp", self.norm(f"{block}.norm2", x))
        return self.norm("norm", x)


@pytest.mark.parametrize("name", ["B", "RMS", "ROTARY", "NOPE", "SWIGLU", "VALUERES", *ARMS[-2:]])
def test_hidden_states_and_gradients_equal_the_formula(name: str) -> None:
    model = model_of(name)
    ids = torch.randint(101, (2, 17), generator=torch.Generator().manual_seed(1))
    written = Written(name, model)
    expected = torch.stack([written.hidden(row) for row in ids])
    found = model.hidden(ids)
    close = 1e-5 if "rotary" in name.lower() else 1e-9  # the tables of the rotation are float32
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).double()
    parameters = list(model.parameters())
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=10 * close, atol=10 * close * float(other.abs().max()))


def test_rotated_scores_depend_on_the_distance_alone_and_start_shifts_the_positions() -> None:
    position = RotaryPosition(64, 8)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = position.rotate(q.expand(1, 1, 64, 8), k.expand(1, 1, 64, 8))
    scores = (turned_q @ turned_k.transpose(2, 3))[0, 0]
    for distance in (0, 1, 7, 40):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scores[5, 0], scores[1, 0], atol=1e-3)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(1, 1, 64), rtol=1e-5, atol=1e-6)
    later, _ = position.rotate(q, k, start=40)
    assert torch.equal(later[0, 0, 0], turned_q[0, 0, 40])
    assert position.rotate(q.bfloat16(), k.bfloat16())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("mix", MIXES)
def test_the_learned_mixes_rotate_queries_and_keys(mix: str) -> None:
    """A reciprocal layer rotates K and Q, then exchanges them; every mix is made of both."""
    model = model_of("RALEARN" + ROTARY, MIXES[mix])
    x_BTC = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3)).double()
    for block in model.blocks:
        attention = block.attention
        q, k, v = attention.project(x_BTC)
        plain = attention.qkv(x_BTC).view(2, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
        for rotated, straight in ((q, plain[0]), (k, plain[1])):
            for b, h in ((0, 0), (1, 1)):
                torch.testing.assert_close(rotated[b, h], turned(straight[b, h]), rtol=1e-6, atol=1e-6)
        with torch.no_grad():
            torch.testing.assert_close(attention(x_BTC), attention.merge(attention.attend(q, k, v)))


ROTATED = [arm + ROTARY for arm in ("RAALL", "RALEARN", "DIFFERENTIAL")]


# WINDOW mixes values outside `fused`, so it is sampled without a cache
@pytest.mark.parametrize("name", [arm for arm in [*ARMS, *ROTATED] if "WINDOW" not in arm])
def test_any_split_of_a_sequence_gives_the_logits_of_one_pass(name: str) -> None:
    model = model_of(name)
    ids = torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(ids)
    for cuts in ([1, 23], [7, 1, 1, 15], [24]):
        cache = Cache()
        parts = [logits(model, part, cache) for part in ids.split(cuts, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ARMS)
def test_attention_maps_are_those_of_the_rotated_queries_and_keys(name: str) -> None:
    model = model_of(name)
    ids = torch.arange(20) * 7 % 101
    found = queries_and_keys(model, ids)
    assert list(found) == [0, 1, 2]
    for query, key in found.values():
        assert layer_maps(query.float(), key.float()).standard.entropy.isfinite().all()
    if "rotary" in name.lower():
        x_BTC = model.blocks[0].norm1(model.token(ids)[None])
        plain = model.blocks[0].attention.qkv(x_BTC)[0, :, :8]
        torch.testing.assert_close(found[0][0][0], turned(plain), rtol=1e-6, atol=1e-6)


def test_weights_of_norms_gates_and_lambdas_have_no_weight_decay() -> None:
    for name in ("RMS", "VALUERES", "LENS", "RABETA", "SWIGLU"):
        model = model_of(name)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decayed = [
            names[id(p)] for g in parameter_groups(model, 0.1) if g["weight_decay"] for p in g["params"]
        ]
        assert all(each.endswith(("weight",)) for each in decayed)
        assert not any("norm" in each or "position" == each for each in decayed)
