"""Load the functions of a file of ra/published or ra/custom that build parts of a model.

attention(layer, spec), norm(layer, spec), mlp(layer, spec)   each returns a module (B, T, C) -> (B, T, C)
position(spec)     a module with the `forward` of gpt2.transformer.LearnedPosition
recipe             settings of the optimizer, such as {"learning_rate": 1e-3}
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from gpt2.initial_weights import keyed_generator
from ra import arms, custom
from ra.arms import VariantError, is_custom, source
from ra.global_state import FIX, GlobalState
from runtime.dotconfig import number_in
from runtime.settings import RECIPE_INTERVALS, AlternationSettings

PARTS = ("attention", "norm", "mlp", "position")


@dataclass(frozen=True)
class AttentionSpec:
    """The inputs of a part besides its layer. block_size: the largest number of positions."""

    layers: int
    heads: int
    width: int
    dropout: float
    alternation: AlternationSettings
    block_size: int


@dataclass(frozen=True)
class Hooks:
    """The parts that a file defines, each with the arguments of its function but for spec; and its recipe."""

    parts: Mapping[str, Callable[..., nn.Module]]
    recipe: Mapping[str, float] = field(default_factory=dict)


def load_hooks(name: str, spec: AttentionSpec) -> Hooks:
    """Import the file of a variant and build each part once. VariantError names the faulty line.

    Another one names what the first import or the building changes outside of the module.
    """
    before = None if module_name(name) in sys.modules else GlobalState()
    with _explained(name):
        module = importlib.import_module(module_name(name))
        functions = {part: getattr(module, part) for part in PARTS if hasattr(module, part)}
        recipe = _recipe(getattr(module, "recipe", {}))
        if not functions and not recipe:
            raise TypeError("it defines none of attention, norm, mlp, position and recipe")
        for part, function in functions.items():
            with keyed_generator(0, name):  # its random draws change no other draws
                built = function(spec) if part == "position" else function(0, spec)
            if not isinstance(built, nn.Module):
                arguments = "spec" if part == "position" else "0, spec"
                raise TypeError(f"{part}({arguments}) returned {type(built).__name__}, not a torch.nn.Module")
    if before and (changed := before.changed()):
        del sys.modules[module_name(name)]  # a second import is refused as well
        raise VariantError(
            f"{name}: ra/{_folder(name)}/{source(name).name} changes {changed} when it is loaded; every run's numbers "
            f"would depend on it; fix: {FIX}"
        )
    return Hooks({part: _with_spec(part, function, spec) for part, function in functions.items()}, recipe)


def _with_spec(
    part: str, function: Callable[..., nn.Module], spec: AttentionSpec
) -> Callable[..., nn.Module]:
    return (lambda: function(spec)) if part == "position" else (lambda layer: function(layer, spec))


def _recipe(values: Any) -> dict[str, float]:
    """Check a recipe. ValueError for an unknown setting, and for a value out of its range."""
    if not isinstance(values, Mapping):
        raise TypeError(f"recipe is {type(values).__name__}, not a dictionary of settings of the optimizer")
    for setting, value in values.items():
        if setting not in RECIPE_INTERVALS:
            raise ValueError(f"recipe has no setting {setting}; settings: {', '.join(RECIPE_INTERVALS)}")
        interval = RECIPE_INTERVALS[setting]
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or number_in(interval, repr(value)) is None
        ):
            raise ValueError(f"recipe: {setting} is {value!r}, not a number in {interval}")
    return {setting: float(value) for setting, value in values.items()}


def module_name(name: str) -> str:
    """Return the module of a published or a custom variant."""
    return f"ra.{_folder(name)}.{source(name).stem}"


@contextmanager
def custom_folder(folder: Path) -> Iterator[None]:
    """Within the block, custom variants are the files of another folder. They may import others of ra/custom."""
    before = arms.CUSTOM_FOLDER, custom.__path__
    loaded = {module for module in sys.modules if module.startswith("ra.custom.")}
    modules = {module: sys.modules.pop(module) for module in loaded}
    arms.CUSTOM_FOLDER, custom.__path__ = folder, [str(folder), *custom.__path__]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        arms.CUSTOM_FOLDER, custom.__path__ = before
        for module in [module for module in sys.modules if module.startswith("ra.custom.")]:
            del sys.modules[module]
        sys.modules.update(modules)


def _folder(name: str) -> str:
    return "custom" if is_custom(name) else "published"


@contextmanager
def _explained(name: str) -> Iterator[None]:
    path = source(name)
    try:
        yield
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        frames = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else None
        text = error.msg if isinstance(error, SyntaxError) else f"{error}"
        message = " ".join(f"{type(error).__name__}: {text}".split())
        fix = (
            "define attention(layer, spec), or another part, as a function that returns a torch.nn.Module "
            "(see docs/variants.md)"
        )
        if isinstance(error, SyntaxError):
            fix = "correct that line"
        elif text.startswith("recipe"):
            fix = "correct the recipe (see docs/variants.md)"
        raise VariantError(
            f"{name}: ra/{_folder(name)}/{path.name}{f', line {line}' if line else ''}: {message}; fix: {fix}"
        ) from error
