"""Fix computations of a model by words such as "upcast:blocks.3.mlp", and undo that (section 2.4.2)."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from referee.errors import NumericsError
from referee.numerics.search.fixed_modules import CPU, KINDS, NAMES, SMALL, Around, FixedModule
from referee.numerics.search.fixed_modules import SMALL_OPERATIONS as SMALL_FUNCTIONS

FORM = "KIND:PATTERN with KIND cpu, upcast or small, such as upcast:blocks.3.mlp"
ROOT = "."  # the whole model, in a pattern
MOST_NAMES = 3  # in a message
ADAMW, SGD, OFF = "small:adamw", "sgd:optimizer", "off:optimizer"
UPDATES = {
    ADAMW: "optimizer by small operations",
    SGD: "optimizer: SGD, each gradient scaled to a root mean square of 1",
    OFF: "optimizer: no update",
}
FLAGS = ("fused", "foreach")  # settings of an optimizer's groups that choose a kernel of many tensors


@dataclass
class Applied:
    """The fixes of a model, as a context or until `undo`. changes: the replaced computations."""

    words: tuple[str, ...]
    changes: list[FixedModule] = field(default_factory=list)
    updates: tuple[str, ...] = ()
    _restored: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def undo(self) -> None:
        """Restore every module and the optimizer."""
        self._restored.close()

    def require_used(self) -> None:
        """Raise NumericsError for a word without a call of what it names. Call it after a step."""
        for word in dict.fromkeys(change.word for change in self.changes):
            mine = [change for change in self.changes if change.word == word]
            if any(change.used for change in mine):
                continue
            names = ", ".join(change.path or change.module for change in mine[:MOST_NAMES])
            function = mine[0].function
            if mine[0].kind == SMALL:
                function = function or " or ".join(SMALL_FUNCTIONS)
            fact = f"{names} did not call {function}" if function else f"{names} was not called"
            if mine[0].kind == CPU:
                fact += ", or its tensors are on the CPU without it"
            raise NumericsError(f"{word} has no effect: {fact}; fix: remove it, or name another module")

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def fix(
    model: nn.Module,
    words: str | Sequence[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    others: Mapping[str, nn.Module] | None = None,
    around: Around = contextlib.nullcontext,
) -> Applied:
    """Replace computations of a model, forward and backward.

    words: "KIND:PATTERN ...". "cpu" computes on the CPU; "upcast" in float32 for half precision and autocast, in
    float64 for float32; "small" replaces fused attention, GELU, LayerNorm and cross-entropy by small operations.
    PATTERN is of module paths as in fnmatch, "." for the whole model; with a dot and the name of a torch function
    behind it, the calls of that function within. "small:adamw", "sgd:optimizer" and "off:optimizer" change the update.
    Parameters and the optimizer's state keep their formats and devices. A fixed module is not compiled.

    others: further modules by name, such as a loss. around: a context of every fixed computation. NumericsError names
    near matches of a pattern without a match; nothing is changed then.
    """
    given = tuple(words.split() if isinstance(words, str) else words)
    modules = dict(model.named_modules()) | dict(others or {})
    modules[ROOT] = modules.pop("")
    applied = Applied(given, updates=tuple(word for word in given if word in UPDATES))
    for word in applied.updates:
        _check_optimizer(word, optimizer)
    for word in given:
        if word not in UPDATES:
            applied.changes += _matches(word, modules, around)
    for change in applied.changes:
        _check_parts(change, modules[change.path])
    for change in applied.changes:
        module = modules[change.path]
        applied._restored.callback(setattr, module, "__class__", type(module))
        module.__class__ = _fixed_class(type(module), change)
    for word in applied.updates:
        applied._restored.enter_context(_changed_update(word, optimizer))
    return applied


def units(model: nn.Module) -> list[str]:
    """Return the paths of the modules within each layer and outside of layers, then the layers, then the model, ".".

    Layers are the members of a ModuleList, ModuleDict or Sequential. Later paths include the code between the earlier
    ones, so that a search for the shortest prefix names the smallest part.
    """
    inner: list[str] = []
    layers: list[str] = []
    for name, child in model.named_children():
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            inner.append(name)
            continue
        for number, layer in child.named_children():
            path = f"{name}.{number}"
            inner += [f"{path}.{part}" for part, _ in layer.named_children()] or [path]
            layers += [path] if path not in inner else []
    return [*inner, *layers, ROOT]


def _matches(word: str, modules: Mapping[str, nn.Module], around: Around) -> list[FixedModule]:
    """Return the modules that a word names, or those in which it names a function. NumericsError for none."""
    kind, sign, pattern = word.partition(":")
    if kind not in KINDS or not sign or not pattern:
        raise NumericsError(f"{word!r} is not a fix; fix: use {FORM}")
    paths, function = _callable_paths(pattern, modules), ""
    if not paths:
        above, _, function = pattern.rpartition(".")
        function = NAMES.get(function, function)
        if function in SMALL_FUNCTIONS or (kind != SMALL and _is_function(function)):
            paths = _callable_paths(above, modules)
    if not paths:
        near = _near(
            pattern, [*modules, *(name.partition(":")[2] for name in UPDATES if name.startswith(kind))]
        )
        raise NumericsError(
            f"{word} matches no module and no function; fix: {f'did you mean {near}' if near else f'use {FORM}'}"
        )
    found = [FixedModule(word, kind, path, type(modules[path]).__name__, function, around) for path in paths]
    return _outermost(found)


def _outermost(changes: Sequence[FixedModule]) -> list[FixedModule]:
    """Leave out modules within another one that the same word names."""

    def within(change: FixedModule, other: FixedModule) -> bool:
        return other.path == ROOT != change.path or change.path.startswith(f"{other.path}.")

    return [change for change in changes if not any(within(change, other) for other in changes)]


def _callable_paths(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths that match, without containers, whose forward is never called; the root by its name alone."""
    return [
        path
        for path, module in modules.items()
        if (path == pattern or (path != ROOT and fnmatch.fnmatchcase(path, pattern)))
        and (type(module).forward is not nn.Module.forward or "forward" in vars(module))
    ]


def _check_parts(change: FixedModule, module: nn.Module) -> None:
    """Raise NumericsError for a module that cannot be replaced, or whose tensors cannot be converted."""
    fact = ""
    for name, part in module.named_modules(prefix=change.path):
        if any(map(is_lazy, part.parameters(recurse=False))):
            fact = (
                f"{name} has parameters without a shape; fix: call the model once before referee.numerics.fix"
            )
        elif change.kind != SMALL and not change.function and getattr(part, "sparse", False):
            fact = f"{name} has sparse gradients, which torch cannot convert; fix: sparse=False"
    if not fact and "forward" in vars(module):
        fact = f"{change.module} has another forward, of another tool or torch.compile; fix: apply fixes before it"
    if fact:
        raise NumericsError(f"{change.word}: {fact}")


def _fixed_class(former: type[nn.Module], change: FixedModule) -> type[nn.Module]:
    """Return a subclass of the same name, whose forward is fixed. A copy of the module is fixed, too."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return change.run(self, lambda *a, **k: former.forward(self, *a, **k), args, kwargs)

    names = {name: getattr(former, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(former.__name__, (former,), names | {"forward": torch.compiler.disable(forward)})


def _check_optimizer(word: str, optimizer: torch.optim.Optimizer | None) -> None:
    lacking = (
        word == ADAMW
        and optimizer
        and any(name not in group for group in optimizer.param_groups for name in FLAGS)
    )
    if optimizer is None or lacking:
        fact = f"{type(optimizer).__name__} has no kernel of many tensors" if optimizer else "none was given"
        raise NumericsError(f"{word} needs an optimizer: {fact}; fix: fix(..., optimizer=optimizer)")


@contextlib.contextmanager
def _changed_update(word: str, optimizer: Any) -> Any:
    """Within the block, the optimizer has another update. Settings that load_state_dict restores are changed again."""
    if word == ADAMW:
        before = [{name: group[name] for name in FLAGS} for group in optimizer.param_groups]

        def unset(loaded: torch.optim.Optimizer) -> None:
            for group in loaded.param_groups:
                group |= dict.fromkeys(FLAGS, False)

        unset(optimizer)
        hook = optimizer.register_load_state_dict_post_hook(unset)
        yield
        hook.remove()
        for group, flags in zip(optimizer.param_groups, before, strict=True):
            group |= flags
        return

    @torch.no_grad()
    def step(*args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups if word == SGD else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    scale = parameter.grad.square().mean().sqrt().clamp(min=1e-30)
                    parameter.sub_(parameter.grad / scale * group["lr"])

    with mock.patch.object(optimizer, "step", step):
        yield


def _is_function(name: str) -> bool:
    places = (torch.nn.functional, torch, torch.Tensor)
    return name.isidentifier() and any(callable(getattr(place, name, None)) for place in places)


def _near(name: str, names: Iterable[str]) -> str:
    """Return the most similar names, joined by commas."""
    return ", ".join(difflib.get_close_matches(name, sorted(filter(None, names)), n=MOST_NAMES, cutoff=0.5))
