"""Noise on a Qwen2's norms: the formula, the norms that have it, and weights that are equal to the bit afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from gpt2.initial_weights import keyed_normal
from grpo.rollout import noisy_norms, rollout_noise
from ra.noise_schedule import PRESETS, NoiseError, NoiseSchedule

IDS = torch.arange(12).view(2, 6)
STRONG = PRESETS["strong"]


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5)
    )  # fmt: skip


@torch.no_grad()
def logits(model: Qwen2ForCausalLM) -> Tensor:
    return model(IDS).logits


def with_noise_in_the_weights(model: Qwen2ForCausalLM, names: list[str], sigma: float, step: int) -> Tensor:
    """The logits of a copy whose weights have the noise."""
    copy = Qwen2ForCausalLM(model.config)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in names:
        weight = state[f"{name}.weight"]
        weight += sigma * keyed_normal(3, f"aqn.{step}.{name}", weight.shape)
    copy.load_state_dict(state)
    return logits(copy)


def test_the_rollout_is_that_of_a_model_with_noise_in_front_of_every_projection(
    model: Qwen2ForCausalLM,
) -> None:
    layers = [f"model.layers.{layer}" for layer in range(2)]
    norms = [
        f"{layer}.{kind}" for layer in layers for kind in ("input_layernorm", "post_attention_layernorm")
    ]
    assert list(noisy_norms(model, STRONG)) == norms
    final = NoiseSchedule(0.1, 0.001, final=True)
    for schedule, names in ((STRONG, norms), (final, [*norms, "model.norm"])):
        with rollout_noise(model, schedule, seed=3, step=12, steps=116) as sigma:
            assert sigma == 0.1
            noisy = logits(model)
        assert torch.equal(noisy, with_noise_in_the_weights(model, names, 0.1, 12))
        assert not torch.equal(noisy, logits(model))


def test_noise_falls_and_is_equal_in_every_batch_of_a_step(model: Qwen2ForCausalLM) -> None:
    def at(step: int, seed: int = 3) -> tuple[float, Tensor]:
        with rollout_noise(model, STRONG, seed, step, 116) as sigma:
            return sigma, logits(model)

    assert at(11) == (0.0, pytest.approx(logits(model)))
    assert torch.equal(at(11)[1], logits(model))  # the first interval has none
    assert at(115)[0] == pytest.approx(0.001)
    assert torch.equal(at(50)[1], at(50)[1])
    assert not torch.equal(at(50)[1], at(51)[1])
    assert not torch.equal(at(50)[1], at(50, seed=4)[1])


def test_weights_are_the_same_objects_and_bits_after_a_rollout_that_fails_too(
    model: Qwen2ForCausalLM,
) -> None:
    before = {name: (value, value.detach().clone()) for name, value in model.named_parameters()}
    with pytest.raises(ValueError, match="sampling"), rollout_noise(model, STRONG, 0, 50, 116):
        raise ValueError("sampling")
    for name, value in model.named_parameters():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])


def test_a_model_without_such_norms_is_refused() -> None:
    with pytest.raises(NoiseError, match=r"Linear has no norms named input_layernorm.*fix: "):
        noisy_norms(torch.nn.Linear(2, 2), STRONG)
