"""Name the platforms on which a trained model is evaluated. Needs no torch.

fp32 | bf16 | fp16 | tf32           the number format of matrix products
int8 | int4 | int3 | int2           weights of all linear layers but the head, symmetric; int8 has one scale for
int4:64 | int4:row                  each output (row), the others one for each group of 32 inputs
dynamic-int8                        weights and activations in int8, scaled for each token
foreign:1e-3                        emulated foreign arithmetic of that strength, by KINDS
foreign.sums:64
bf16@w7900                        the same on another machine than that of training, which has that name
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt2.cpu_linear import standard_kernels
from gpt2.initial_weights import derive_seed
from gpt2.training_step import autocast
from runtime.dotconfig import number_in
from runtime.errors import UserError

FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "tf32": "float32 with TF32 products"}
WEIGHTS = {"int8": (8, 0), "int4": (4, 32), "int3": (3, 32), "int2": (2, 32)}  # bits, inputs with one scale
DYNAMIC = "dynamic-int8"
ROW = "row"
KINDS = {  # kind -> what its strength is, and its interval
    "error": ("relative standard deviation of a random error of every result", "[0, 1]"),
    "bias": ("relative error toward zero of every result", "[0, 1)"),
    "sums": ("inputs of a linear layer between two roundings of its sum to bfloat16; 0: none", "[0, 65536]"),
    "exp": ("relative error of the exponential in the softmax, a function of its argument", "[0, 1)"),
    "flush": ("size below which a result becomes zero", "[0, 1]"),
}
LONGEST_NAME = 64  # of a platform without its machine: it is part of a file's name
MACHINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
GRAMMAR = (
    "fp32, bf16, fp16, tf32, int8, int4, int3, int2, int4:64, int4:row, dynamic-int8, foreign:1e-3 or "
    "foreign.KIND:1e-3"
)


class PlatformError(UserError, ValueError):
    """A platform is unknown, or this machine does not have it."""


@dataclass(frozen=True)
class Platform:
    """A platform. format: of matrix products. bits: of the weights, None: those of training.

    group: inputs with one scale; 0: all. dynamic: activations in int8 as well. kind, strength: of foreign arithmetic;
    kind "" is the machine's own. machine: where it is evaluated; "": the machine of training.
    """

    name: str
    format: str = "float32"
    bits: int | None = None
    group: int = 0
    dynamic: bool = False
    kind: str = ""
    strength: float = 0.0
    machine: str = ""

    @property
    def label(self) -> str:
        """The name with the machine: bf16@w7900."""
        return f"{self.name}@{self.machine}" if self.machine else self.name

    @property
    def text(self) -> str:
        """The platform in words."""
        return self._arithmetic + (f", on {self.machine}" if self.machine else "")

    @property
    def _arithmetic(self) -> str:
        if self.kind:
            return f"foreign arithmetic, {KINDS[self.kind][0]}: {self.strength:g}"
        if self.dynamic:
            return "int8 weights and activations, scaled for each output and each token"
        if self.bits:
            scales = f"groups of {self.group} inputs" if self.group else "one scale for each output"
            return f"int{self.bits} weights, {scales}"
        return FORMATS[self.name]


def machine_name(text: str) -> str:
    """Return a name of a machine, such as MACHINE=w7900. PlatformError for a malformed one."""
    if not MACHINE_NAME.fullmatch(text):
        raise PlatformError(
            f"MACHINE={text or '(empty)'} is not a machine name; fix: up to 48 letters, digits, dots and dashes: "
            "MACHINE=w7900"
        )
    return text


def name_of_device(device: str) -> str:
    """Derive a machine's name from that of its device: "NVIDIA H200" gives nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:48].rstrip("-") or "unnamed"


def parse_platform(label: str) -> Platform:
    """Parse a platform, with @machine for another machine than that of training.

    PlatformError for an unknown name, kind, group, strength or machine.
    """
    name, at, machine = label.partition("@")
    return replace(_parse(name), machine=machine_name(machine) if at else "")


def local_platforms(names: Sequence[str], variable: str) -> None:
    """Refuse names that are malformed or name a machine. variable: of make's command line. PlatformError."""
    for name in names:
        platform = parse_platform(name)
        if platform.machine:
            raise PlatformError(
                f"{variable}: {name} names a machine; fix: on that machine, {variable}={platform.name} "
                f"MACHINE={platform.machine}"
            )


def _parse(name: str) -> Platform:
    if len(name) > LONGEST_NAME:
        raise PlatformError(
            f"{name[:LONGEST_NAME]}... has {len(name)} characters, more than {LONGEST_NAME}; fix: a shorter number"
        )
    head, separator, value = name.partition(":")
    if head in FORMATS and not separator:
        return Platform(name, FORMATS[head].split()[0])
    if name == DYNAMIC:
        return Platform(name, bits=8, dynamic=True)
    if head in WEIGHTS:
        bits, group = WEIGHTS[head]
        return Platform(name, bits=bits, group=_group(name, value) if separator else group)
    if head.partition(".")[0] == "foreign":
        return _foreign(name, head, value)
    raise PlatformError(f"there is no platform {name or '(empty)'}; fix: use {GRAMMAR}")


def _group(name: str, value: str) -> int:
    if value == ROW:
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,5}", value):
        fix = f"use {name.partition(':')[0]}:32"
        raise PlatformError(f"{name}: {value or '(empty)'} is not a group size; fix: {fix}")
    return int(value)


def _foreign(name: str, head: str, value: str) -> Platform:
    kind = head.partition(".")[2] or ("" if "." in head else "error")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise PlatformError(
            f"{name}: there is no kind {kind or '(empty)'}; fix: foreign.KIND with one of {known}"
        )
    meaning, interval = KINDS[kind]
    strength = number_in(interval, value)
    if strength is None or (kind == "sums" and strength != int(strength)):
        raise PlatformError(
            f"{name}: {value or '(empty)'} is not a number in {interval} ({meaning}); fix: foreign:1e-3"
        )
    return Platform(name, kind=kind, strength=strength)


# Put a trained model on a platform: number format, quantised weights (torchao), or emulated foreign arithmetic.


LINEAR = (F.linear,)
PRODUCTS = (
    torch.mm, torch.addmm, torch.matmul, torch.bmm,
    Tensor.mm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm,
    torch.einsum, torch.baddbmm, Tensor.addmm, Tensor.baddbmm, torch.tensordot, torch.inner, Tensor.inner,
)  # fmt: skip
SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
OTHERS = (F.gelu, F.silu, F.layer_norm, F.rms_norm, torch.rms_norm, torch.layer_norm)
WAVES = 8.0  # of the error of exp, for each unit of its argument


class ForeignArithmetic(TorchFunctionMode):
    """Give the results of products, softmax, GELU and norms the error of a platform."""

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self.kind, self.strength = platform.kind, platform.strength
        self.generator = torch.Generator("cpu").manual_seed(derive_seed("foreign", platform.name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if func in LINEAR and self.kind == "sums":
            return self.chunked(*args, **kwargs)
        if func in SOFTMAX and self.kind == "exp":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return self.softmax(args[0] if args else kwargs["input"], dim)
        result = func(*args, **kwargs)
        affected = func in LINEAR or func in PRODUCTS or func in SOFTMAX or func in OTHERS
        return self.altered(result) if affected and isinstance(result, Tensor) else result

    def altered(self, result: Tensor) -> Tensor:
        """Return a result with the error of the kinds that every function has."""
        if self.kind == "error":
            noise = torch.randn(result.shape, generator=self.generator, dtype=torch.float32)
            factor = 1 + self.strength * noise.to(result.device)
            return (result * factor).to(result.dtype)  # a narrow result is rounded after the product
        if self.kind == "bias":
            return result * (1 - self.strength)
        if self.kind == "flush":
            return torch.where(result.abs() < self.strength, torch.zeros_like(result), result)
        return result

    def chunked(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sum a product in chunks of inputs, and round the sum to bfloat16 after each chunk."""
        size, total = int(self.strength), None
        for start in range(0, x.shape[-1], size):
            part = F.linear(x[..., start : start + size], weight[..., start : start + size])
            total = (part if total is None else total + part).bfloat16().to(x.dtype)
        assert total is not None
        return (total if bias is None else total + bias).to(part.dtype)

    def softmax(self, scores: Tensor, dim: int) -> Tensor:
        """Compute a softmax whose exponential has a relative error that depends on its argument."""
        shifted = scores - scores.amax(dim, keepdim=True)
        weights = shifted.exp() * (1 + self.strength * torch.sin(WAVES * shifted.nan_to_num(neginf=0.0)))
        return weights / weights.sum(dim, keepdim=True)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Write attention out, so that its two products and its softmax have the error as well. No dropout."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
        scores = self.altered(query @ key.transpose(-2, -1)) * (scale or 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if attn_mask is not None:
            hidden = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if hidden else scores + attn_mask
        weights = self.softmax(scores, -1) if self.kind == "exp" else self.altered(scores.softmax(-1))
        return self.altered(weights @ value)


@contextlib.contextmanager
def foreign_arithmetic(foreign: ForeignArithmetic) -> Iterator[None]:
    """Emulate foreign arithmetic in the block; the machine's own at a strength of 0. Each block draws other errors."""
    if not foreign.strength:
        yield
        return
    with standard_kernels(), foreign:  # products of the CPU kernels are not torch functions
        yield


HEAD = "lm_head"  # of a model of transformers; that of GPT2 is no module
Model = TypeVar("Model", bound=nn.Module)
Autocast = Callable[[], AbstractContextManager[Any]]


def on_platform(
    model: Model, platform: Platform, device: str, home: str = "float32"
) -> tuple[Model, Autocast]:
    """Return the model on a platform, and the context of its forward passes. The model itself is unchanged.

    home: number format of training, which foreign arithmetic alters. Quantised weights are used in float32. The head
    shares its weights with the token embedding and stays in float32. PlatformError for what this machine or this model
    does not have.
    """
    require(platform, device)
    if platform.bits:
        return quantised(model, platform), standard_kernels  # torch's layers know quantised weights
    if platform.kind:
        foreign = ForeignArithmetic(platform)
        return model, lambda: _foreign_arithmetic(foreign, autocast(device, home))
    if platform.name == "tf32":
        return model, _tf32
    return model, lambda: autocast(device, platform.format)


@contextlib.contextmanager
def _foreign_arithmetic(foreign: ForeignArithmetic, home: AbstractContextManager[Any]) -> Iterator[None]:
    with home, foreign_arithmetic(foreign):
        yield


def require(platform: Platform, device: str) -> None:
    """PlatformError if the device lacks the number format."""
    if platform.name == "tf32" and not (device.startswith("cuda") and torch.version.cuda):
        raise PlatformError("tf32 needs an NVIDIA GPU; fix: leave it out of PLATFORM here")


def quantised(model: Model, platform: Platform) -> Model:
    """Return a copy of the model whose linear layers are quantised by torchao."""
    for name in ("torchao", "torch.utils._pytree"):  # warn of kernels and of interfaces that are not used
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from torchao import quantization as torchao
    except ImportError:
        raise PlatformError(
            f"{platform.name} needs torchao, which is not installed; fix: pip install torchao==0.18.0"
        ) from None
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear)
            and name != HEAD
            and platform.group
            and module.in_features % platform.group
        ):
            raise PlatformError(
                f"{platform.name}: groups of {platform.group} do not divide the {module.in_features} inputs of {name}; "
                f"fix: use a group size that divides them, or int{platform.bits}:row"
            )
    config: Any
    if platform.dynamic:
        config = torchao.Int8DynamicActivationInt8WeightConfig()
    else:
        granularity = torchao.PerGroup(platform.group) if platform.group else torchao.PerAxis(0)
        dtype = getattr(torch, f"int{platform.bits}")
        config = torchao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
    copied = copy.deepcopy(model)
    torchao.quantize_(
        copied, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != HEAD
    )
    return copied


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
