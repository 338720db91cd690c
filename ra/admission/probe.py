"""The model that an examination runs: a variant's attentions with random weights, at a small shape.

Weights are either GPT-2's initial ones or perturbed ones: of ordinary size, every parameter away from its initial
value, so that a path behind a zero-initialised gate has an effect.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from gpt2.initial_weights import initialise, keyed_normal, keyed_parts
from gpt2.transformer import GPT2, LearnedPosition, ModelParts
from ra.arms import VariantError, parse_arm
from ra.global_state import GlobalState
from ra.variants import variant
from runtime.settings import AlternationSettings, ModelConfig, OptimizerConfig

M = TypeVar("M", bound=nn.Module)
VOCABULARY = 61
MOST_WIDTH = 256  # a wider model is examined with fewer heads of the same size
MOST_LAYERS = 12  # of those, the first, the last and evenly spaced ones between
ORDINARY = 97  # tokens of most passes: beyond 64, no power of two
LONGEST = 4096  # tokens of the longest pass; T x T scores of a custom attention fit into memory up to here
EXAMINED_STEPS = (
    0,
    1,
    10,
    100,
    1000,
    10_000,
    100_000,
)  # a module with begin_step is examined at each of them
# Relative rounding of outputs in bfloat16: a smaller difference can move an entry by a unit in the last place, 2^-8, so
# four units are allowed.
BFLOAT16_ROUNDING = 4 * 2.0**-8
STRENGTHS = (1.0, 0.25, 0.05)  # of the perturbation, until the output is finite
OPTIMIZER = OptimizerConfig(1e-3, 0.1, 0.0, 0.1, 0.9, 0.95, 1e-8, 1.0)  # of the examined training step
ALL_DTYPES = (torch.float64, torch.float32)


class Probe:
    """A variant and the shapes at which it is examined.

    study: the model that will be trained. shape: the small model. layers: of the study, those examined.
    dtypes: in which the attention runs, the widest first. before: the state of the process.
    """

    def __init__(
        self, name: str, study: ModelConfig, alternation: AlternationSettings, autocast: bool = False
    ) -> None:
        """autocast: the study trains in bfloat16."""
        self.before = GlobalState(generators=False)  # before the first call
        self.name, self.alternation, self.autocast = name, alternation, autocast
        self.study = replace(variant(name, study, alternation).model, dropout=0.0)
        self.layers = spread(study.layers, MOST_LAYERS)
        self.shape = self._working_shape()
        self.dtypes = [dtype for dtype in ALL_DTYPES if self._runs(self.shape, dtype)]

    @property
    def ordinary(self) -> int:
        return min(ORDINARY, self.study.block_size)

    @property
    def full(self) -> int:
        """The block size, or LONGEST where it is longer."""
        return min(LONGEST, self.study.block_size)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the passes at the small shape, without the full one."""
        return [length for length in (1, 2, 3, 16, 17, 32, 64, 65, 80, 96) if length < self.ordinary] + [
            self.ordinary
        ]

    @property
    def edges(self) -> list[int]:
        """Positions in `layers` that represent all of them in the costlier checks."""
        return spread(len(self.layers), 3)

    def _working_shape(self) -> ModelConfig:
        """The study's head size with few heads; the study's own shape where the variant needs its heads."""
        size = self.study.width // self.study.heads
        heads = max(1, min(self.study.heads, MOST_WIDTH // size))
        small = replace(self.study, heads=heads, width=heads * size)
        small_runs = heads == self.study.heads or any(self._runs(small, dtype) for dtype in ALL_DTYPES)
        return small if small_runs else self.study

    def _runs(self, shape: ModelConfig, dtype: torch.dtype) -> bool:
        try:
            model = self.model("initial", dtype, shape, (0,))
            run(examined_part(model, 0), inputs(1, min(8, shape.block_size), shape.width, dtype))
        except VariantError:
            raise
        except (Exception, SystemExit):  # the user's code may raise anything; the check "shape" reports it
            return False
        return True

    def model(
        self,
        weights: str = "perturbed",
        dtype: torch.dtype = torch.float64,
        shape: ModelConfig | None = None,
        layers: tuple[int, ...] = (),
        dropout: float = 0.0,
    ) -> GPT2:
        """Return the model of these layers with "initial" or "perturbed" weights. It is shared: never change it."""
        return _model(self, weights, dtype, shape or self.shape, layers or tuple(self.layers), dropout)

    def parts(self, weights: str, dtype: torch.dtype, edges: bool = False) -> list[tuple[int, nn.Module]]:
        """(layer of the study, its examined part). edges: of a few layers only."""
        model = self.model(weights, dtype)
        chosen = self.edges if edges else range(len(self.layers))
        return [(self.layers[number], examined_part(model, number)) for number in chosen]

    @staticmethod
    def forget() -> None:
        """Free the models of this probe."""
        _model.cache_clear()
        working_dtype.cache_clear()

    def model_parts(self, shape: ModelConfig) -> ModelParts:
        """Return the variant's parts at the sizes of `shape`."""
        return variant(parse_arm(self.name).parts_name, shape, self.alternation).parts

    def build(self, shape: ModelConfig, layers: tuple[int, ...], dropout: float = 0.0) -> GPT2:
        """Build the model as a run does, with initial weights in float32."""
        parts = self.model_parts(replace(shape, dropout=dropout))

        def layer_of(number: int) -> int:
            return layers[number] if number < len(layers) else self.study.layers  # the final norm

        model = ExaminedModel(
            layers=len(layers),
            heads=shape.heads,
            width=shape.width,
            block_size=shape.block_size,
            vocabulary=VOCABULARY,
            padded_vocabulary=VOCABULARY,
            dropout=dropout,
            parts=keyed_parts(parts, 0, layer_of),
        )
        model.whole_blocks = any((parts.norm, parts.mlp, parts.position))
        initialise(model, 0)
        return model


class ExaminedModel(GPT2):
    """A model whose parts are examined. whole_blocks: whether more than the attention differs from GPT-2."""

    whole_blocks: bool = False


class PositionedBlock(nn.Sequential):
    """The positions of a variant, then a block: positions see the block's input as the token embeddings."""


def examined_part(model: nn.Module, number: int) -> nn.Module:
    """Return the attention of a block; the block itself where norms, MLPs or positions are the variant's as well.

    The first block is examined behind the positions where they are the variant's.
    """
    assert isinstance(model, GPT2)
    block = model.blocks[number]
    if number == 0 and type(model.position) is not LearnedPosition:
        return PositionedBlock(model.position, block)
    module = block if getattr(model, "whole_blocks", False) else block.attention
    assert isinstance(module, nn.Module)
    return module


@functools.lru_cache(maxsize=32)
def _model(
    probe: Probe,
    weights: str,
    dtype: torch.dtype,
    shape: ModelConfig,
    layers: tuple[int, ...],
    dropout: float,
) -> GPT2:
    built = probe.build(shape, layers, dropout)
    if weights == "initial":
        return pristine(built).to(dtype)  # on a copy: a parameter may be shared with other models
    for strength in STRENGTHS:
        model = pristine(built)
        perturb(model, strength)
        model.to(dtype)
        x_BTC = inputs(1, min(17, shape.block_size), shape.width, dtype)
        if all(
            bool(run(examined_part(model, number), x_BTC).isfinite().all()) for number in range(len(layers))
        ):
            break
    return model


@torch.no_grad()
def perturb(model: nn.Module, strength: float) -> None:
    """Move every parameter away from its value, by amounts that depend on its name and shape only.

    Matrices get normal values of the size that keeps activations of order 1. Vectors and scalars change by up to
    30 % and by 0.05 to 0.15, so that a positive one such as a temperature stays positive.
    """
    for name, parameter in model.named_parameters():
        draw = keyed_normal(1, name, parameter.shape).to(parameter.dtype)
        if parameter.dim() >= 2:
            parameter.add_(draw, alpha=strength / math.sqrt(parameter.shape[-1]))
        else:
            share = draw.clamp(-1, 1)
            parameter.mul_(1 + 0.3 * strength * share).add_(
                strength * (0.05 + 0.1 * share.abs()) * share.sign()
            )


def spread(count: int, most: int) -> list[int]:
    """At most `most` of 0 .. count-1: the first, the last and evenly spaced ones between."""
    if count <= most:
        return list(range(count))
    return sorted({round(number * (count - 1) / (most - 1)) for number in range(most)})


@functools.lru_cache(maxsize=128)
def inputs(rows: int, tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Standard normal inputs (B, T, C), as a layer norm gives them. The tensor is shared: never change it."""
    return keyed_normal(seed, "inputs", torch.Size((rows, tokens, width))).to(dtype)


def at_steps(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module at later training steps, with the words of a message; nothing where no `begin_step` sets anything."""
    setters = [name for name, part in module.named_modules() if hasattr(part, "begin_step")]
    for iteration in EXAMINED_STEPS if setters else ():
        later = pristine(module)
        parts: dict[str, Any] = dict(later.named_modules())
        try:
            for name in setters:
                parts[name].begin_step(iteration)
        except Exception:  # such as the end of a schedule: the study may be shorter
            continue
        yield f", after begin_step({iteration})", later


def seed_generators() -> None:
    """Give every generator of random numbers one state, so that two passes draw the same numbers."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU as well
    random.seed(0)
    np.random.seed(0)


@contextlib.contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the generators of random numbers after the block."""
    state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(state)
    np.random.set_state(numpy_state)


def pristine(module: M) -> M:
    """A copy of a module that was never called, so that state of one pass cannot reach another."""
    try:
        return copy.deepcopy(module, _empty_dicts(module))
    except (Exception, SystemExit):  # a module that cannot be copied is used as it is
        return module


def _empty_dicts(module: nn.Module) -> dict[int, Any]:
    """The memo of a deep copy with the copies of all empty dicts: a module has ten, and deepcopy is slow at them."""
    values = (value for part in module.modules() for value in vars(part).values())
    return {id(value): type(value)() for value in values if type(value) in (dict, OrderedDict) and not value}


def run(
    module: nn.Module, x_BTC: Tensor, training: bool = True, grad: bool = False, copied: bool = True
) -> Any:
    """One pass on a copy of the module and of its input, with seeded generators."""
    module = (pristine(module) if copied else module).train(training)
    seed_generators()
    with torch.set_grad_enabled(grad):
        return module(x_BTC * 1)  # not a leaf, as in a model, where an in-place operation on it is possible


def run_autocast(module: nn.Module, x_BTC: Tensor, training: bool = True) -> Tensor:
    """One pass under bfloat16 autocast; the output in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        y_BTC: Tensor = run(module, x_BTC, training)
    return y_BTC.float()


class NarrowestDtype(TorchFunctionMode):
    """Record the narrowest floating dtype that a torch function in the block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.found: torch.dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            floating = isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
            if floating and torch.finfo(leaf.dtype).eps > torch.finfo(self.found).eps:
                self.found = leaf.dtype
        return result


@functools.lru_cache(maxsize=256)
def working_dtype(module: nn.Module, width: int, dtype: torch.dtype) -> torch.dtype:
    """The narrowest dtype that the attention computes in: rounding is that of this dtype."""
    with NarrowestDtype() as mode:
        run(module, inputs(1, 8, width, dtype))
    wider = torch.finfo(mode.found).eps < torch.finfo(dtype).eps
    return dtype if wider else mode.found


def row_rounding(dtype: torch.dtype, tokens: int) -> float:
    """Most relative difference between two passes of one shape at a position whose inputs are equal.

    Both make the same operations in the same order, so most attentions differ by nothing. One that transforms the
    sequence (FFT convolution) has the transform's error, eps log2(2 T) times the norm, which is sqrt(T) times an
    entry (Higham 2002, Theorem 24.2); 8 is for the chain of transforms. Narrower than float32: as float32.
    """
    eps = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return 8 * eps * math.log2(2 * tokens + 2) * math.sqrt(tokens)


def shape_rounding(dtype: torch.dtype, tokens: int, width: int) -> float:
    """Most relative difference between passes of two shapes, whose kernels may add up in another order.

    A sum of n terms has a relative error of at most n eps (Higham 2002, section 3.1). An attention chains about
    eight: projections over C, scores and values over T, normalisations.
    """
    eps = torch.finfo(dtype).eps
    return min(8 * eps * (tokens + 4 * width), 16 * eps if eps > 1e-4 else 1.0)


def difference(first: Tensor, second: Tensor) -> tuple[float, int]:
    """Largest absolute difference of (B, T, C) relative to the largest value, and the first position that has it.

    NaN differs from everything but NaN. The position is the first at which the difference is a tenth of the largest.
    """
    # most pairs are equal; the rest of the function is ten times as slow
    if torch.equal(first, second) and bool(first.isfinite().all()):
        return 0.0, 0
    both_nan = first.isnan() & second.isnan()
    change_T = (first - second).abs().masked_fill(both_nan, 0).nan_to_num(math.inf).amax((0, 2))
    scale = max(float(first[first.isfinite()].abs().amax()) if first.isfinite().any() else 0.0, 1e-30)
    largest = float(change_T.max())
    position = int((change_T >= largest / 10).nonzero()[0]) if largest > 0 else 0
    return largest / scale, position
