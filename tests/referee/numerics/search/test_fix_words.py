"""Words of fixes: what they name, which are refused, and updates of the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from referee.numerics import NumericsError, fix
from tests.referee.numerics.search.small_models import Block, model_of, step


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("upcast:blocks.0.mpl", "blocks.0.mpl matches no module and no function; fix: did you mean blocks.0.mlp"),
        ("raise:blocks.0", "'raise:blocks.0' is not a fix"),
        ("small:adamw", "needs an optimizer"),
        ("upcast:sparse", "sparse has sparse gradients"),
        ("upcast:lazy", "lazy has parameters without a shape"),
        ("upcast:compiled", "OptimizedModule has another forward"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_line_and_changes_nothing(words: str, message: str) -> None:
    model = model_of()
    model.sparse, model.lazy = nn.Embedding(9, 2, sparse=True), nn.LazyLinear(3)
    model.compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(NumericsError, match=message) as caught:
        fix(model, f"upcast:blocks.0 {words}")
    assert "fix: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(model.blocks[0]) is Block


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("small:blocks.0.mlp.0", "blocks.0.mlp.0 did not call scaled_dot_product_attention or gelu"),
        ("cpu:blocks.0.mlp", "or its tensors are on the CPU without it"),
        ("upcast:unused", "unused was not called"),
    ],
)
def test_a_fix_without_effect_is_an_error(words: str, message: str) -> None:
    model = model_of()
    model.unused = nn.Linear(2, 2)
    with fix(model, words) as applied:
        step(model)
        with pytest.raises(NumericsError, match=message):
            applied.require_used()


def test_small_adamw_updates_as_the_fused_one_and_keeps_its_state() -> None:
    model, other = model_of(), model_of()
    optimizer, plain = (torch.optim.AdamW(one.parameters(), lr=1e-2, fused=True) for one in (model, other))
    step(model), step(other)
    optimizer.step(), plain.step()
    with fix(model, "small:adamw", optimizer=optimizer):
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        assert optimizer.param_groups[0]["fused"] is False
        step(model), step(other)
        optimizer.step(), plain.step()
    assert optimizer.param_groups[0]["fused"] is True
    states = zip(optimizer.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True)
    for mine, theirs in states:
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-8)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
