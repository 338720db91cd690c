"""Initialise GPT-2: weights keyed by (seed, parameter name), and digests of them.

Each tensor is a pure function of the seed and its name. So all variants and devices start from the same shared weights,
whatever further parameters a variant has.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.model.transformer import GPT2, CausalSelfAttention, UnsetEmbedding, UnsetLinear

INITIAL_STD = 0.02  # GPT-2's; residual projections get 0.02 / sqrt(2 * layers)


def derive_seed(*key: int | str) -> int:
    """Derive a generator's seed from a key, such as (seed, parameter name)."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, key)).encode()).digest()[:8], "big") >> 1


def keyed_normal(seed: int, name: str, shape: torch.Size) -> Tensor:
    """Draw a standard normal float32 tensor: a pure function of (seed, name, shape).

    Drawn on the CPU in float64, then rounded. A float32 draw depends on the width of the processor's vector units; a
    float64 draw does not.
    """
    generator = torch.Generator("cpu").manual_seed(derive_seed(seed, name))
    return torch.randn(shape, generator=generator, dtype=torch.float64).float()


@contextlib.contextmanager
def keyed_generator(seed: int, name: str) -> Iterator[None]:
    """Within the block, seed torch's global CPU generator with (seed, name); restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed every GPU as well
        torch.default_generator.manual_seed(derive_seed(seed, name))
        yield


def standard_shapes(model: GPT2) -> dict[str, torch.Size]:
    """Return names and shapes of the parameters of the same model with standard attention. All variants share these."""
    with torch.device("meta"):
        standard = CausalSelfAttention(model.token.weight.shape[1], 1)
    shapes = {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if ".attention." not in name  # blocks.<layer>.attention.<the variant's>
    }
    for layer in range(len(model.blocks)):
        for name, parameter in standard.named_parameters():
            shapes[f"blocks.{layer}.attention.{name}"] = parameter.shape
    return shapes


def shared_names(model: GPT2) -> list[str]:
    """Return the parameter names that this model shares with the standard model: same name, same shape."""
    shapes = standard_shapes(model)
    return [name for name, parameter in model.named_parameters() if shapes.get(name) == parameter.shape]


def _unset_names(model: GPT2) -> set[str]:
    """Return names of parameters in UnsetLinear and UnsetEmbedding modules, those of a variant's attention included."""
    modules = [
        name for name, module in model.named_modules() if isinstance(module, (UnsetLinear, UnsetEmbedding))
    ]
    return {f"{name}.{kind}" for name in modules for kind in ("weight", "bias")}


def initial_value(seed: int, name: str, shape: torch.Size, layers: int) -> Tensor:
    """Return a parameter's initial value, float32: biases 0, norms 1, matrices drawn from (seed, name)."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) < 2:
        return torch.ones(shape)
    residual = name.endswith(("attention.proj.weight", "mlp.proj.weight"))
    return keyed_normal(seed, name, shape) * (
        INITIAL_STD / math.sqrt(2 * layers) if residual else INITIAL_STD
    )


@torch.no_grad()
def initialise(model: GPT2, seed: int) -> list[str]:
    """Set GPT-2's initial weights in place and return the names that were set, in the model's order.

    Sets the parameters shared with the standard model, and those that an attention built from UnsetLinear or
    UnsetEmbedding. Every other parameter of an attention keeps the value from its constructor. Padded vocabulary rows
    are zero.
    """
    to_set = {*shared_names(model), *_unset_names(model)}
    names = []
    for name, parameter in model.named_parameters():
        if name in to_set:
            parameter.copy_(initial_value(seed, name, parameter.shape, len(model.blocks)))
            names.append(name)
    model.token.weight[model.vocabulary :] = 0.0
    return names


def weights_digest(model: GPT2, seed: int) -> str:
    """Return the SHA-256 over names and bytes of the shared parameters, independent of the device.

    A standard parameter that the model lacks, or has in another shape, enters with the standard initial value of that
    seed. So two digests differ exactly where a shared parameter differs.
    """
    digest = hashlib.sha256()
    shapes, shared = standard_shapes(model), set(shared_names(model))
    parameters = dict(model.named_parameters())
    for name in sorted(shapes):
        if name in shared:
            tensor = parameters[name].detach().cpu()
        else:
            tensor = initial_value(seed, name, shapes[name], len(model.blocks))
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
