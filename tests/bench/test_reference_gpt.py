"""The plain GPT computes the same function as the project's model."""

import pytest
import torch

from bench.cases import Sizes
from bench.reference_gpt import PlainGPT, take_weights
from gpt2.training_step import build_model
from runtime.settings import ModelConfig


def test_the_plain_model_is_the_same_function_as_ours() -> None:
    ours, plain = (
        build_model(ModelConfig("small", 2, 2, 16, 8, 0.0, 50, 64), None),
        PlainGPT(Sizes("small", 2, 2, 16, 8), 50),
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    take_weights(plain, ours)
    ids = torch.randint(50, (3, 9), generator=generator)
    expected = ours.loss(ids[:, :-1], ids[:, 1:]).item()
    assert plain(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(expected, rel=1e-6)
