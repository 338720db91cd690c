"""The changes of a model that inject a fault."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.referee.numerics.corpus.models import IDS, OURS, loss_of, path_of

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS = 4


@dataclass(frozen=True)
class Parts:
    """A model and its modules by the names of models.PATHS. kind: of the model."""

    kind: str
    model: Any

    def __getitem__(self, name: str) -> Any:
        return self.model.get_submodule(path_of(name, self.kind))

    @property
    def ours(self) -> bool:
        return self.kind == OURS


def set_forward(module: Any, forward: Callable[..., Any]) -> None:
    """Give a module another forward, as another version of its class has: nothing else of the module differs."""
    _subclass(module, forward=forward)


def _subclass(module: Any, **methods: Any) -> None:
    old = type(module)
    names = {"__module__": old.__module__, "__qualname__": old.__qualname__}
    module.__class__ = type(old.__name__, (old,), names | methods)


# -- computation


def other_gelu(parts: Parts) -> None:
    if parts.ours:
        set_forward(parts["mlp"], lambda self, x: F.dropout(self.proj(F.gelu(self.fc(x))), self.dropout))
    else:
        parts["mlp"].act = nn.GELU()


def residual_after_norm(parts: Parts) -> None:
    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        if parts.ours:
            x = self.norm1(x + self.attention(x))
            return torch.as_tensor(self.norm2(x + self.mlp(x)))
        x = self.ln_1(x + self.attn(x)[0])
        return torch.as_tensor(self.ln_2(x + self.mlp(x)))

    set_forward(parts["block"], forward)


def attention(mix: Mix, part: str = "attention") -> Callable[[Parts], None]:
    """Return a change of the attention to `mix` of q, k and v."""

    def forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        y = mix(*map(_heads, self.c_attn(x).split(x.shape[-1], -1)))
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2))), None

    def change(parts: Parts) -> None:
        if parts.ours:
            set_forward(parts[part], lambda self, x: self.merge(mix(*self.project(x))))
        else:
            set_forward(parts[part], forward)

    return change


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def swapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(k, q, v, is_causal=True)


def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def longer_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Read a mask of longer rows as if it had rows of T elements."""
    T = q.shape[2]
    longer = torch.ones(T + 3, T + 3, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=longer.view(-1)[: T * T].view(T, T))


def wrap(module: Any, around: Callable[..., Any]) -> None:
    """Change a module's forward to around(forward, *args)."""
    forward = module.forward
    set_forward(module, lambda self, *args, **options: around(forward, *args, **options))


def in_bf16(module: Any) -> None:
    module.bfloat16()
    wrap(module, lambda forward, x: forward(x.bfloat16()).float())


def dropout(parts: Parts) -> None:
    if parts.ours:
        parts["mlp"].dropout = 0.1
    else:
        parts["dropout"].p = 0.1


def with_nan(module: Any) -> None:
    def around(forward: Any, *args: Any) -> Tensor:
        y: Tensor = forward(*args).clone()
        y.view(-1)[3] = float("nan")
        return y

    wrap(module, around)


def flip_bit(module: Any) -> None:
    """Flip a bit of the mantissa of one element of the result: an error of about 3 % of the element."""

    def around(forward: Any, x: Tensor) -> Tensor:
        y: Tensor = forward(x).clone()
        bits = y.detach().view(-1).view(torch.int32)
        bits[y.detach().abs().view(-1).argmax()] ^= 1 << 18
        return y

    wrap(module, around)


def overwrite(parts: Parts) -> None:
    """Overwrite a run of the memory of the residual stream before block 1."""
    block = parts["block"]

    old = type(block)

    def call(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
        x.detach().view(-1).numpy()[1024:3072] = 1.5
        return old.__call__(self, x, *args, **options)

    _subclass(block, __call__=call)


def shift_positions(parts: Parts) -> None:
    weights = parts.model.position if parts.ours else parts.model.transformer.wpe
    if parts.ours:

        def hidden(self: Any, ids: Tensor) -> Any:
            T = ids.shape[1]
            x = self.token(ids) + weights.weight.roll(-1, 0)[:T]
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

        parts.model.hidden = types.MethodType(hidden, parts.model)
    else:
        wrap(weights, lambda forward, ids: forward((ids + 1) % weights.num_embeddings))


# -- weights


@torch.no_grad()
def corrupt(module: Any) -> None:
    module.weight.view(-1)[17] += 0.01


@torch.no_grad()
def stale(module: Any) -> None:
    draws = torch.Generator().manual_seed(1)
    module.weight.copy_(torch.randn(module.weight.shape, generator=draws) * 0.02)


@torch.no_grad()
def truncate(module: Any) -> None:
    module.weight[module.weight.shape[0] // 2 :] = 0


@torch.no_grad()
def transpose(module: Any) -> None:
    module.weight.copy_(module.weight.t().clone())


@torch.no_grad()
def lose_bias(module: Any) -> None:
    module.bias.fill_(0.01)  # the golden bias is 0


def exchange_layers(parts: Parts) -> None:
    """Load the layers' weights in the other order; the norms' weights are all 1 and all 0."""
    first, second = parts["first block"], parts["block"]
    weights = [{name: value.clone() for name, value in part.state_dict().items()} for part in (first, second)]
    first.load_state_dict(weights[1])
    second.load_state_dict(weights[0])


# -- backward


class WrongGradient(torch.autograd.Function):
    """GELU with the gradient of ReLU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        passed: Tensor = received[0] * (x > 0)
        return passed


class RightGradient(WrongGradient):
    """GELU with the gradient of GELU."""

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (passed,) = torch.autograd.grad(F.gelu(x, approximate="tanh"), x, received[0])
        return torch.as_tensor(passed)


def custom_gelu(function: Any) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        if parts.ours:
            set_forward(parts["mlp"], lambda self, x: self.proj(function.apply(self.fc(x))))
        else:
            set_forward(parts["gelu"], lambda self, x: function.apply(x))

    return change


class Embedding(torch.autograd.Function):
    """Rows of a weight, whose gradient is summed in `dtype`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.size, ctx.dtype = weight.shape, dtype
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.size, dtype=ctx.dtype)
        total.index_add_(0, ids.flatten(), received[0].flatten(0, -2).to(ctx.dtype))
        return None, total.to(received[0].dtype), None


def custom_embedding(parts: Parts, dtype: torch.dtype = torch.float32) -> None:
    apply: Any = Embedding.apply
    set_forward(parts["tokens"], lambda self, ids: apply(ids, self.weight, dtype))


def coarse_embedding(parts: Parts) -> None:
    custom_embedding(parts, torch.bfloat16)


def untie(parts: Parts) -> None:
    parts["head"].weight = nn.Parameter(parts["head"].weight.detach().clone())


def reduce_in_bf16(parts: Parts) -> None:
    for parameter in parts.model.parameters():
        parameter.register_post_accumulate_grad_hook(_round_gradient)


def _round_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.bfloat16().float()


# -- several steps or calls


def clip(model: nn.Module) -> None:
    """Clip the gradients of even parameters' norms to a half, which Adam's second step shows."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)


def wrong_now_and_then(module: Any, step: int) -> None:
    """Add an error to one element of a product in one call."""
    calls = iter(range(1_000_000))

    def around(forward: Any, x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        if next(calls) != step:
            return y
        wrong = y.clone()
        wrong.view(-1)[100] += 0.5
        return wrong

    wrap(module, around)


def twice(model: nn.Module) -> None:
    """Run two requests through the same model."""
    for ids in IDS[:2].chunk(2):
        torch.autograd.backward(0.25 * loss_of(model, ids[:, :-1], ids[:, 1:]))


def cached_attention(parts: Parts, clear: bool) -> None:
    """Attend to the keys and values of earlier calls as well; `clear` drops them before."""
    kept: list[tuple[Tensor, Tensor]] = []

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if clear:
            kept.clear()
        past = kept.copy()
        kept.append((k.detach(), v.detach()))
        keys, values = (torch.cat([*(pair[side] for pair in past), now], 2) for side, now in ((0, k), (1, v)))
        T, before = q.shape[2], keys.shape[2] - q.shape[2]
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        mask = torch.cat([torch.ones(T, before, dtype=torch.bool), mask], 1)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    attention(mix, "first attention")(parts)


def scatter(module: Any, seed: int) -> None:
    """Add eight parts of each element in a given order, as one kernel with atomic additions does."""
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed)).tolist()

    def add(y: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return sum((y * (0.1 + 0.03 * part) for part in order), torch.zeros_like(y))

    wrap(module, lambda forward, x: add(forward(x)))


# -- the same function, written in another way


@torch.no_grad()
def separate_qkv(parts: Parts) -> None:
    """Compute q, k and v by three layers instead of one."""
    for name in ("first attention", "attention"):
        module = parts[name]
        whole = module.qkv if parts.ours else module.c_attn
        for letter, weight, bias in zip(
            "qkv", whole.weight.chunk(3, 0 if parts.ours else 1), whole.bias.chunk(3), strict=True
        ):
            layer = copy.deepcopy(whole)
            layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
            layer.nf = layer.out_features = len(bias)
            module.add_module(f"{letter}_proj", layer)
        if parts.ours:
            del module.qkv
            _subclass(module, project=_project)
        else:
            del module.c_attn
            _subclass(module, forward=_separate_forward)


def _project(self: Any, x: Tensor) -> list[Tensor]:
    return [_heads(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj)]


def _heads(x: Tensor) -> Tensor:
    B, T, C = x.shape
    return x.view(B, T, HEADS, C // HEADS).transpose(1, 2)


def _separate_forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Any:
    q, k, v = _project(self, x)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2))), None
