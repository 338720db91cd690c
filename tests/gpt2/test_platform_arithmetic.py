"""Test a model on other platforms: the machine's own to the bit, the stated error, and the model itself unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2 import cpu_linear
from gpt2.initial_weights import initialise
from gpt2.platforms import KINDS, ForeignArithmetic, PlatformError, on_platform, parse_platform
from gpt2.training_step import build_model
from gpt2.transformer import GPT2
from ra.variants import variant
from runtime.settings import AlternationSettings, ModelConfig

SIZES = ModelConfig("test", 2, 2, 64, 32, 0.0, 97, 128)


def trained(name: str = "B") -> GPT2:
    chosen = variant(name, SIZES, AlternationSettings("output", 0.5, 100.0))
    model = build_model(chosen.model, chosen.parts).eval()
    initialise(model, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def model() -> Iterator[GPT2]:
    built = trained()
    before = {name: value.clone() for name, value in built.state_dict().items()}
    yield built
    assert all(torch.equal(before[name], value) for name, value in built.state_dict().items())
    assert cpu_linear.use_cpu_kernels(torch.ones(2))


@torch.no_grad()
def losses(model: GPT2, name: str, home: str = "float32") -> Tensor:
    ids = torch.arange(4 * 33).view(4, 33) * 7 % 97
    placed, context = on_platform(model, parse_platform(name), "cpu", home)
    with context():
        return placed.token_losses(ids[:, :-1], ids[:, 1:]).double()


@pytest.mark.parametrize("name", ["fp32", *(f"foreign.{kind}:0" for kind in KINDS)])
def test_a_strength_of_zero_is_the_machine_itself_to_the_bit(model: GPT2, name: str) -> None:
    ids = torch.arange(4 * 33).view(4, 33) * 7 % 97
    with torch.no_grad():
        assert torch.equal(losses(model, name), model.token_losses(ids[:, :-1], ids[:, 1:]).double())


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_arithmetic_alters_that_of_training(model: GPT2, kind: str) -> None:
    """A model that was trained in bfloat16 is evaluated in bfloat16: strength 0 is its home, to the bit."""
    home = losses(model, "bf16")
    assert not torch.equal(home, losses(model, "fp32"))
    assert torch.equal(losses(model, f"foreign.{kind}:0", "bfloat16"), home)
    strength = "64" if kind == "sums" else "1e-2"
    found = losses(model, f"foreign.{kind}:{strength}", "bfloat16")
    assert 0 < float((found - home).abs().mean()) < 0.1


@pytest.mark.parametrize(
    "name", ["foreign:1e-3", "foreign.bias:1e-3", "foreign.exp:1e-2", "foreign.sums:8", "int4"]
)
def test_two_evaluations_are_equal_to_the_bit_and_differ_from_home(model: GPT2, name: str) -> None:
    first = losses(model, name)
    assert torch.equal(first, losses(model, name))
    assert not torch.equal(first, losses(model, "fp32"))


@pytest.mark.parametrize("kind", ["error", "bias", "exp"])
@pytest.mark.parametrize("arm", ["B", "RALEARN", "WINDOW", "DIFFERENTIAL"])
def test_the_effect_falls_with_the_strength(kind: str, arm: str) -> None:
    model = trained(arm)
    home = losses(model, "fp32")
    sizes = [float((losses(model, f"foreign.{kind}:{s:g}") - home).abs().mean()) for s in (1e-6, 1e-3, 0.3)]
    assert sizes[0] < 1e-4
    assert sizes == sorted(sizes)
    assert sizes[2] > 1e-3


def test_a_random_error_has_the_stated_size_in_every_function() -> None:
    x, weight = torch.randn(64, 128), torch.randn(96, 128)
    strength = 1e-2
    calls = {
        "linear": lambda: F.linear(x, weight),
        "product": lambda: x @ weight.T,
        "einsum": lambda: torch.einsum("nc,mc->nm", x, weight),
        "added product": lambda: torch.baddbmm(torch.zeros(1, 64, 96), x[None], weight.T[None]),
        "silu": lambda: F.silu(x),
        "gelu": lambda: F.gelu(x, approximate="tanh"),
        "layer norm": lambda: F.layer_norm(x, (128,)),
        "rms norm": lambda: F.rms_norm(x, (128,)),
        "softmax": lambda: x.softmax(-1),
    }
    for name, call in calls.items():
        exact = call()
        with ForeignArithmetic(parse_platform(f"foreign:{strength}")):
            ratio = (call() / exact - 1)[exact.abs() > 1e-4]
        assert float(ratio.std()) == pytest.approx(strength, rel=0.05), name
        assert abs(float(ratio.mean())) < 4 * strength / math.sqrt(ratio.numel()), name
        with ForeignArithmetic(parse_platform(f"foreign.bias:{strength}")):
            assert torch.allclose(call(), exact * (1 - strength), rtol=1e-5), name


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_written_out_is_torchs(mask: str | None) -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64).unbind()
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().tril(3)
    allowed[:, 0] = True
    added = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~allowed, -30.0)
    given = {None: None, "bool": allowed, "float": added}[mask]
    expected = F.scaled_dot_product_attention(q, k, v, given, is_causal=mask is None, scale=0.3)
    with ForeignArithmetic(parse_platform("foreign.flush:1e-300")):
        found = F.scaled_dot_product_attention(q, k, v, given, is_causal=mask is None, scale=0.3)
    assert torch.allclose(found, expected, atol=1e-12)


def test_chunked_sums_round_to_bfloat16() -> None:
    x, weight, bias = torch.randn(5, 48), torch.randn(7, 48), torch.randn(7)
    with ForeignArithmetic(parse_platform("foreign.sums:20")):
        found = F.linear(x, weight, bias)
    total = torch.zeros(5, 7)
    for part in (slice(0, 20), slice(20, 40), slice(40, 48)):
        total = (total + x[:, part] @ weight[:, part].T).bfloat16().float()
    assert torch.allclose(found, total + bias, rtol=1e-2, atol=1e-2)
    assert torch.equal((found - bias).bfloat16().float(), total)


def refuse_other_levels(found: Tensor, weight: Tensor, bits: int, group: int) -> None:
    """Check that each weight is the nearest of 2^bits equidistant levels that cover its group symmetrically."""
    blocks, levels = (
        x.detach().double().unflatten(1, (-1, group or weight.shape[1])) for x in (weight, found)
    )
    scale = blocks.abs().amax(-1, keepdim=True) / ((2**bits - 1) / 2)
    steps = levels / scale
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert steps.round().min() >= -(2 ** (bits - 1))
    assert steps.round().max() <= 2 ** (bits - 1) - 1
    assert ((levels - blocks).abs() / scale).max() < 0.501


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2", "int4:row", "int8:16"])
def test_quantised_weights_are_the_nearest_levels(model: GPT2, name: str) -> None:
    platform = parse_platform(name)
    assert platform.bits
    placed, _ = on_platform(model, platform, "cpu")
    seen = 0
    for path, module in placed.named_modules():
        if isinstance(module, nn.Linear):
            original = model.get_submodule(path).weight
            eye = torch.eye(module.in_features)
            with torch.no_grad():
                found = F.linear(eye, module.weight).T
            refuse_other_levels(found, original, platform.bits, platform.group)
            seen += 1
    assert seen == 8
    assert torch.equal(placed.token.weight, model.token.weight)  # the head is not quantised


def test_a_platform_that_is_not_there_is_refused(model: GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlatformError, match="tf32 needs an NVIDIA GPU"):
        on_platform(model, parse_platform("tf32"), "cpu")
    with pytest.raises(
        PlatformError, match=r"int4:48: groups of 48 do not divide the 64 inputs of .*fix: .*int4:row"
    ):
        on_platform(model, parse_platform("int4:48"), "cpu")
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(PlatformError, match="int8 needs torchao, which is not installed; fix: pip install"):
        on_platform(model, parse_platform("int8"), "cpu")
