"""Put a trained model on a platform: number format, quantised weights (torchao), or emulated foreign arithmetic."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from aqn.foreign import ForeignArithmetic, foreign_arithmetic
from aqn.platforms import Platform, PlatformError
from gpt2.model import cpu_linear
from gpt2.model.transformer import GPT2
from gpt2.train.step import autocast

Autocast = Callable[[], AbstractContextManager[Any]]


def on_platform(model: GPT2, platform: Platform, device: str, home: str = "float32") -> tuple[GPT2, Autocast]:
    """Return the model on a platform, and the context of its forward passes. The model itself is unchanged.

    home: number format of training, which foreign arithmetic alters. Quantised weights are used in float32. The head
    shares its weights with the token embedding and stays in float32. PlatformError for what this machine or this model
    does not have.
    """
    require(platform, device)
    if platform.bits:
        return quantised(model, platform), _without_cpu_kernels
    if platform.kind:
        foreign = ForeignArithmetic(platform)
        return model, lambda: _foreign(foreign, autocast(device, home))
    if platform.name == "tf32":
        return model, _tf32
    return model, lambda: autocast(device, platform.format)


@contextlib.contextmanager
def _foreign(foreign: ForeignArithmetic, home: AbstractContextManager[Any]) -> Iterator[None]:
    with home, foreign_arithmetic(foreign):
        yield


def require(platform: Platform, device: str) -> None:
    """PlatformError if the device lacks the number format."""
    if platform.name == "tf32" and not (device.startswith("cuda") and torch.version.cuda):
        raise PlatformError("tf32 needs an NVIDIA GPU; fix: leave it out of PLATFORM here")


def quantised(model: GPT2, platform: Platform) -> GPT2:
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
        if isinstance(module, nn.Linear) and platform.group and module.in_features % platform.group:
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
    torchao.quantize_(copied, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return copied


@contextlib.contextmanager
def _without_cpu_kernels() -> Iterator[None]:
    """Use torch's own linear layers, which know quantised weights."""
    kernels: set[str] = cpu_linear.CPU_KERNEL_DEVICES
    cpu_linear.CPU_KERNEL_DEVICES = set()
    try:
        yield
    finally:
        cpu_linear.CPU_KERNEL_DEVICES = kernels


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
