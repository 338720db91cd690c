"""An injected fault is the first divergence, in a GPT-2 of ours and in one of transformers."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.numerics.compare.small_models import (
    IDS,
    MODULES,
    STATISTICS,
    TENSORS,
    compared,
    ours,
    record,
    step,
    transformers_gpt2,
)

Change = Callable[[Any], None]
SHIFTED = IDS.roll(1, 1)


@dataclass(frozen=True)
class Fault:
    """ours, transformers: the change of the model. run: its step. expected: the path of the module in each model.

    direction: of the first divergence. cause: allowed causes, where the divergence is outside of every module.
    """

    ours: Change | None
    transformers: Change | None
    expected: tuple[str, str]
    direction: str = "forward"
    cause: tuple[str, ...] = ()
    run: Callable[[nn.Module], None] = step


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = types.MethodType(forward, module)


def other_gelu_ours(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.dropout(self.proj(F.gelu(self.fc(x))), self.dropout, self.training)

    set_forward(model.blocks[1].mlp, forward)


def other_gelu(model: Any) -> None:
    model.transformer.h[1].mlp.act = nn.GELU()


def epsilon(module: Any) -> None:
    module.eps = 1e-6


def post_norm_ours(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))

    set_forward(model.blocks[1], forward)


def post_norm(model: Any) -> None:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        x = self.ln_1(x + self.attn(x)[0])
        return self.ln_2(x + self.mlp(x))

    set_forward(model.transformer.h[1], forward)


def attention_ours(change: Callable[..., Tensor]) -> Change:
    def apply(model: Any) -> None:
        set_forward(
            model.blocks[1].attention,
            lambda self, x: self.merge(change(*self.project(x))),
        )

    return apply


def attention(change: Callable[..., Tensor]) -> Change:
    def apply(model: Any) -> None:
        def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
            B, T, C = x.shape
            q, k, v = (part.view(B, T, 4, C // 4).transpose(1, 2) for part in self.c_attn(x).split(C, -1))
            y = change(q, k, v).transpose(1, 2).reshape(B, T, C)
            return self.resid_dropout(self.c_proj(y)), None

        set_forward(model.transformer.h[1].attn, forward)

    return apply


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(k, q, v, is_causal=True)


def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def corrupt(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.view(-1)[17] += 0.01


def stale(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)


def in_bf16(module: Any) -> None:
    forward = type(module).forward
    module.bfloat16()
    set_forward(module, lambda self, x: forward(self, x.bfloat16()).float())


def with_nan(module: Any) -> None:
    forward = type(module).forward

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        y = forward(self, *args, **options).clone()
        y.view(-1)[3] = float("nan")
        return y

    set_forward(module, broken)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return received[0] * (x > 0)


class RightGradient(WrongGradient):
    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(F.gelu(x, approximate="tanh"), x, received[0])[0]


def custom_gelu(function: Any) -> tuple[Change, Change]:
    def change_ours(model: Any) -> None:
        set_forward(model.blocks[1].mlp, lambda self, x: self.proj(function.apply(self.fc(x))))

    def change(model: Any) -> None:
        set_forward(model.transformer.h[1].mlp.act, lambda self, x: function.apply(x))

    return change_ours, change


def overwrite(blocks: Callable[[Any], Any]) -> Change:
    """Overwrite a run of the memory of the residual stream between blocks 0 and 1."""

    def apply(model: Any) -> None:
        block = blocks(model)[1]

        class Overwriting(type(block)):  # type: ignore[misc]
            def __call__(self, x: Tensor, *args: Any, **options: Any) -> Any:
                x.detach().view(-1).numpy()[1024:3072] = 1.5
                return super().__call__(x, *args, **options)

        Overwriting.__name__ = type(block).__name__
        block.__class__ = Overwriting

    return apply


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def shifted(model: nn.Module) -> None:
    step(model, SHIFTED)


def unscaled_loss(model: nn.Module) -> None:
    step(model, scale=1)


WRONG, RIGHT = custom_gelu(WrongGradient), custom_gelu(RightGradient)
FAULTS = {
    "other GELU": Fault(other_gelu_ours, other_gelu, ("blocks.1.mlp", "transformer.h.1.mlp.act")),
    "epsilon": Fault(
        lambda m: epsilon(m.blocks[1].norm2),
        lambda m: epsilon(m.transformer.h[1].ln_2),
        ("blocks.1.norm2", "transformer.h.1.ln_2"),
    ),
    "residual order": Fault(post_norm_ours, post_norm, ("blocks.1", "transformer.h.1")),
    "missing scale": Fault(
        attention_ours(unscaled), attention(unscaled), ("blocks.1.attention", "transformer.h.1.attn")
    ),
    "swapped q and k": Fault(
        attention_ours(swapped), attention(swapped), ("blocks.1.attention", "transformer.h.1.attn")
    ),
    "wrong mask": Fault(
        attention_ours(unmasked), attention(unmasked), ("blocks.1.attention", "transformer.h.1.attn")
    ),
    "corrupted element": Fault(
        lambda m: corrupt(m.blocks[1].mlp.fc.weight),
        lambda m: corrupt(m.transformer.h[1].mlp.c_fc.weight),
        ("blocks.1.mlp.fc", "transformer.h.1.mlp.c_fc"),
    ),
    "stale weight": Fault(
        lambda m: stale(m.blocks[1].attention.proj.weight),
        lambda m: stale(m.transformer.h[1].attn.c_proj.weight),
        ("blocks.1.attention.proj", "transformer.h.1.attn.c_proj"),
    ),
    "one layer in bf16": Fault(
        lambda m: in_bf16(m.blocks[1].mlp.fc),
        lambda m: in_bf16(m.transformer.h[1].mlp.c_fc),
        ("blocks.1.mlp.fc", "transformer.h.1.mlp.c_fc"),
    ),
    "dropout left on": Fault(
        lambda m: setattr(m.blocks[1].mlp, "dropout", 0.1),
        lambda m: setattr(m.transformer.h[1].mlp.dropout, "p", 0.1),
        ("blocks.1.mlp", "transformer.h.1.mlp.dropout"),
    ),
    "NaN in layer 1": Fault(
        lambda m: with_nan(m.blocks[1].mlp),
        lambda m: with_nan(m.transformer.h[1].mlp),
        ("blocks.1.mlp", "transformer.h.1.mlp"),
    ),
    "wrong backward": Fault(WRONG[0], WRONG[1], ("blocks.1.mlp", "transformer.h.1.mlp.act"), "backward"),
    "overwritten memory": Fault(
        overwrite(lambda m: m.blocks), overwrite(lambda m: m.transformer.h), ("blocks.1", "transformer.h.1")
    ),
    "embedding not tied": Fault(None, untie, ("", "lm_head"), "backward"),
    "shifted data": Fault(lambda m: None, lambda m: None, ("", ""), cause=("data",), run=shifted),
    "gradient not averaged": Fault(
        lambda m: None,
        lambda m: None,
        ("", ""),
        "backward",
        ("gradient", "missing", "settings"),
        unscaled_loss,
    ),
}
CASES = [
    pytest.param(name, make, mode, id=f"{name}, {label}, {title}")
    for name in FAULTS
    for label, make in (("ours", ours), ("transformers", transformers_gpt2))
    for title, mode in (("statistics", STATISTICS), ("tensor", TENSORS), ("modules", MODULES))
    if not (name == "embedding not tied" and make is ours)
]
records: dict[Any, Path] = {}


def golden(make: Callable[[], nn.Module], mode: dict[str, Any], change: Change | None, folder: Path) -> Path:
    """Return the record of the correct model; it is computed once."""
    key = make, tuple(mode.items()), change
    if key not in records:
        model = make()
        if change:
            change(model)
        records[key] = record(folder, model, **mode)
    return records[key]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize(("name", "make", "mode"), CASES)
def test_the_changed_module_is_the_first_divergence(
    name: str, make: Callable[[], nn.Module], mode: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    side = int(make is not ours)
    change = (fault.ours, fault.transformers)[side]
    assert change
    right = golden(make, mode, RIGHT[side] if name == "wrong backward" else None, folder)
    torch.manual_seed(0)
    model = copy.deepcopy(make())
    change(model)
    found = compared(record(tmp_path, model, fault.run, **mode), right)
    assert found.verdict == "diverges"
    assert found.first
    first = found.first[1]
    facts = first.name, first.direction, first.cause, first.why
    assert first.direction == fault.direction, facts
    if fault.cause:
        assert first.cause in fault.cause, facts
    elif name == "overwritten memory":
        assert fault.expected[side] in first.name, facts
    else:
        assert first.module == fault.expected[side], facts
