"""Initialise GPT-2: weights keyed by (seed, parameter name), and digests of them.

Each tensor is a pure function of the seed and its name. So all variants and devices start from the same shared weights,
whatever further parameters a variant has.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from gpt2.transformer import GPT2, ModelParts, UnsetEmbedding, UnsetLinear

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


def keyed_parts(parts: ModelParts, seed: int, layer_of: Callable[[int], int] = int) -> ModelParts:
    """Let the constructors of the parts draw random numbers that are a function of (seed, part, layer) alone.

    torch's generator is unchanged. layer_of: number of a layer in this model -> its number in the keys.
    """

    def keyed(kind: str, build: Callable[[int], nn.Module] | None) -> Callable[[int], nn.Module] | None:
        calls: Counter[int] = Counter()  # of a layer: it has two norms

        def build_keyed(number: int) -> nn.Module:
            assert build is not None
            layer = layer_of(number)
            calls[layer] += 1
            with keyed_generator(seed, f"blocks.{layer}.{kind}{calls[layer] if calls[layer] > 1 else ''}"):
                return build(layer)

        return build_keyed if build else None

    def position() -> nn.Module:
        assert parts.position is not None
        with keyed_generator(seed, "position"):
            return parts.position()

    return ModelParts(
        attention=keyed("attention", parts.attention),
        norm=keyed("norm", parts.norm),
        mlp=keyed("mlp", parts.mlp),
        position=position if parts.position else None,
    )


@functools.cache
def standard_shapes(layers: int, width: int, block_size: int, rows: int) -> dict[str, torch.Size]:
    """Return names and shapes of GPT-2's parameters, which all variants of a size share. rows: padded vocabulary."""
    with torch.device("meta"):
        standard = GPT2(
            layers=layers,
            heads=1,
            width=width,
            block_size=block_size,
            vocabulary=rows,
            padded_vocabulary=rows,
        )
    return {name: parameter.shape for name, parameter in standard.named_parameters()}


def _shapes_of(model: GPT2) -> dict[str, torch.Size]:
    rows, width = model.token.weight.shape
    return standard_shapes(len(model.blocks), width, model.block_size, rows)


def shared_names(model: GPT2) -> list[str]:
    """Return the parameter names that this model shares with the standard model: same name, same shape."""
    shapes = _shapes_of(model)
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


def names_to_set(model: GPT2) -> set[str]:
    """Return the names of the parameters that `initialise` sets; the others keep the value from their constructor."""
    return {*shared_names(model), *_unset_names(model)}


@torch.no_grad()
def initialise(model: GPT2, seed: int) -> list[str]:
    """Set GPT-2's initial weights in place and return the names that were set, in the model's order.

    Sets the parameters shared with the standard model, and those of every UnsetLinear and UnsetEmbedding. Every other
    parameter keeps the value from its constructor. Padded vocabulary rows are zero.
    """
    to_set = names_to_set(model)
    names = []
    for name, parameter in model.named_parameters():
        if name in to_set:
            parameter.copy_(initial_value(seed, name, parameter.shape, len(model.blocks)))
            names.append(name)
    model.token.weight[model.vocabulary :] = 0.0
    return names


def state_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all weights by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_digest(model: GPT2, seed: int, shapes: Mapping[str, torch.Size] | None = None) -> str:
    """Return the SHA-256 over names and bytes of the standard parameters, independent of the device.

    shapes: of the study's standard model; None: of this model's size. A standard parameter that the model lacks, or has
    in another shape, enters with the standard initial value of that seed. So two digests differ exactly where a shared
    parameter differs.
    """
    digest = hashlib.sha256()
    shapes = _shapes_of(model) if shapes is None else shapes
    layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
    parameters = dict(model.named_parameters())
    for name in sorted(shapes):
        if name in parameters and parameters[name].shape == shapes[name]:
            tensor = parameters[name].detach().cpu()
        else:
            tensor = initial_value(seed, name, shapes[name], layers)
            if name == "token.weight":
                tensor[model.vocabulary :] = 0.0
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
