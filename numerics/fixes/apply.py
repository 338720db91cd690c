"""`numerics.fix`: apply fixes by name, and undo them."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from numerics.errors import NumericsError
from numerics.fixes.computation import Around, Computation
from numerics.fixes.conversion import CPU, KINDS, SMALL
from numerics.fixes.small import NAMES
from numerics.fixes.small import SMALL as SMALL_FUNCTIONS

ADAMW = "adamw"
FORM = "KIND:PATTERN with KIND cpu, upcast or small, such as upcast:blocks.3.mlp"
MOST_NAMES = 3  # in a message
FLAGS = ("fused", "foreach")  # settings of an optimizer's groups that choose a kernel of many tensors


@dataclass(frozen=True)
class Change:
    """One replaced computation. function: "" where the whole module is fixed. parameters: in the module."""

    word: str
    kind: str
    path: str
    function: str
    module: str
    parameters: int

    def __str__(self) -> str:
        what = {
            "cpu": "on the CPU", "upcast": "in a wider format", "small": "by small operations"
        }[self.kind]  # fmt: skip
        of = f"{self.function} in {self.path}" if self.function else self.path or self.module
        return f"{of} ({self.module}) {what}"


@dataclass
class Applied:
    """The fixes of a model. Use it as a context, or call `undo`. words: as given."""

    words: tuple[str, ...]
    changes: tuple[Change, ...] = ()
    computations: list[Computation] = field(default_factory=list)
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    flags: list[dict[str, Any]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)

    def undo(self) -> None:
        """Restore every module and the optimizer."""
        for module, former in reversed(self.classes):
            module.__class__ = former
        self.classes.clear()
        if self.optimizer is not None:
            self.hooks.pop().remove()
            for group, flags in zip(self.optimizer.param_groups, self.flags, strict=True):
                group |= flags
        self.optimizer = None

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer's small operations, also after load_state_dict, which restores the saved settings."""
        self.optimizer = optimizer
        self.flags = [{name: group[name] for name in FLAGS} for group in optimizer.param_groups]

        def set_flags(loaded: torch.optim.Optimizer) -> None:
            for group in loaded.param_groups:
                group |= dict.fromkeys(FLAGS, False)

        set_flags(optimizer)
        self.hooks.append(optimizer.register_load_state_dict_post_hook(set_flags))

    def require_used(self) -> None:
        """Raise NumericsError for a word without a call of a module or function that it names; call it after a step."""
        pairs = list(zip(self.changes, self.computations, strict=True))
        for word in dict.fromkeys(change.word for change in self.changes):
            mine = [(change, computation) for change, computation in pairs if change.word == word]
            called = set[str]().union(*(computation.called for _, computation in mine))
            names = ", ".join(change.path or change.module for change, _ in mine[:MOST_NAMES])
            function, kind = mine[0][0].function, mine[0][0].kind
            if not any(computation.calls for _, computation in mine):
                fact, fix = f"{names} was not called in the step", "name modules whose forward is called"
            elif function and function not in called:
                near = _near(function, filter(_is_function, called))
                fact, fix = f"{names} did not call {function}", f"use one of {near or 'its own functions'}"
            elif kind == SMALL and not function and not called & {*SMALL_FUNCTIONS}:
                fact, fix = f"{names} calls none of {', '.join(SMALL_FUNCTIONS)}", "name a module that does"
            elif kind == CPU and not any(computation.moved for _, computation in mine):
                fact, fix = f"the tensors of {names} are on the CPU without it", "remove it"
            else:
                continue
            raise NumericsError(f"{word} has no effect: {fact}; fix: {fix}")

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
    """Replace computations of a model, forward and backward, and return what was changed.

    words: "KIND:PATTERN ...". "cpu" computes on the CPU; "upcast" in float32 for half precision and autocast, in
    float64 for float32; "small" replaces fused attention, GELU, LayerNorm and cross-entropy by small operations.
    PATTERN is of module paths as in fnmatch, or such a pattern, a dot and the name of a torch function that is called
    within: "upcast:blocks.*.attention.softmax". "small:adamw" is of the optimizer. Parameters and the optimizer's
    state keep their formats and devices. Under torch.compile a fixed module runs without being compiled.

    others: further modules by name, such as a loss. around: a context of every fixed computation. NumericsError names
    near matches of a pattern without a match; nothing is changed then.
    """
    given = tuple(words.split() if isinstance(words, str) else words)
    modules = dict(model.named_modules()) | dict(others or {})
    first = {id(module): path for path, module in modules.items()}
    paths = model.named_modules(remove_duplicate=False)
    aliases = {path: first[id(module)] for path, module in paths if path not in modules}
    found: list[tuple[Change, nn.Module]] = []
    unfused = False
    for word in given:
        kind, sign, pattern = word.partition(":")
        if kind not in KINDS or not sign or not pattern:
            raise NumericsError(f"{word!r} is not a fix; fix: use {FORM}")
        if pattern == ADAMW:
            _check_optimizer(word, kind, optimizer)
            unfused = True
            continue
        found += _matches(word, kind, pattern, modules, aliases)
    for change, module in found:
        _check_parts(change, module)
        if "forward" in vars(module):
            raise NumericsError(
                f"{type(module).__name__} has a forward of its own, which another tool or torch.compile has set; fix: "
                "apply fixes before it"
            )
    applied = Applied(given, tuple(change for change, _ in found))
    for change, module in found:
        computation = Computation(change.path or change.module, change.kind, change.function, around)
        applied.computations.append(computation)
        applied.classes.append((module, type(module)))
        module.__class__ = _fixed_class(type(module), computation)
    if unfused and optimizer is not None:
        applied.set_optimizer(optimizer)
    return applied


def _check_parts(change: Change, module: nn.Module) -> None:
    """Raise NumericsError for a module with parts whose tensors cannot be replaced or converted."""
    for name, part in module.named_modules(prefix=change.path):
        if isinstance(part, torch.jit.ScriptModule):
            raise NumericsError(
                f"{change.word}: {name or change.module} is a module of torch.jit, which no fix can change; fix: apply "
                "fixes to the model before torch.jit.script or trace"
            )
        if any(map(is_lazy, part.parameters(recurse=False))):
            raise NumericsError(
                f"{change.word}: {name or change.module} has parameters without a shape; fix: call the model once "
                "before numerics.fix"
            )
        embeds = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if embeds and change.kind != SMALL and change.function in ("", "embedding", "embedding_bag"):
            raise NumericsError(
                f"{change.word}: {name or change.module} has sparse gradients, which torch cannot convert; fix: "
                f"{type(part).__name__}(..., sparse=False)"
            )


def _check_optimizer(word: str, kind: str, optimizer: torch.optim.Optimizer | None) -> None:
    if kind != SMALL:
        raise NumericsError(f"{word} is unknown; fix: use {SMALL}:{ADAMW}")
    if optimizer is None or any(name not in group for group in optimizer.param_groups for name in FLAGS):
        given = "none was given" if optimizer is None else f"{type(optimizer).__name__} has no such kernel"
        raise NumericsError(f"{word} needs an AdamW of torch: {given}; fix: fix(..., optimizer=optimizer)")


def _fixed_class(former: type[nn.Module], computation: Computation) -> type[nn.Module]:
    """Return a subclass of the same name, whose forward is fixed. A copy of the module is fixed, too."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return computation.run(self, lambda *a, **k: former.forward(self, *a, **k), args, kwargs)

    names = {name: getattr(former, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(former.__name__, (former,), names | {"forward": torch.compiler.disable(forward)})


def _matches(
    word: str, kind: str, pattern: str, modules: Mapping[str, nn.Module], aliases: Mapping[str, str]
) -> list[tuple[Change, nn.Module]]:
    """Return the modules that a pattern names, or those in which it names a function.

    aliases: further name of a module -> its first name, which patterns match.
    """
    paths, function = _callable_paths(pattern, modules), ""
    if not paths:
        above, _, last = pattern.rpartition(".")
        last = NAMES.get(last, last)
        if last in SMALL_FUNCTIONS or (kind != SMALL and _is_function(last)):
            function = last
            paths = _callable_paths(above, modules)
    # a module within another one is fixed with it
    paths = [path for path in paths if not any(_within(path, other) for other in paths)]
    if not paths:
        for path, first in aliases.items():
            if fnmatch.fnmatchcase(path, pattern):
                raise NumericsError(f"{word}: {path} is another name of {first}; fix: use {kind}:{first}")
        near = _near(pattern, [*modules, *(f"{kind}:{ADAMW}" if kind == SMALL else ())])
        raise NumericsError(
            f"{word} matches no module and no function; fix: {f'did you mean {near}' if near else f'use {FORM}'}"
        )
    return [
        (
            Change(
                word,
                kind,
                path,
                function,
                type(modules[path]).__name__,
                sum(one.numel() for one in modules[path].parameters() if not is_lazy(one)),
            ),
            modules[path],
        )
        for path in paths
    ]


def _callable_paths(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths that match, without containers, whose forward is never called; the root only by its name ""."""
    return [
        path
        for path, module in modules.items()
        if (fnmatch.fnmatchcase(path, pattern) and (path or not pattern)) and _has_forward(module)
    ]


def _has_forward(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # its class has no forward that can be read
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _within(path: str, other: str) -> bool:
    return path != other and (path.startswith(f"{other}.") or not other)


def _is_function(name: str) -> bool:
    places = (torch.nn.functional, torch, torch.Tensor)
    return name.isidentifier() and any(callable(getattr(place, name, None)) for place in places)


def _near(name: str, names: Any) -> str:
    """Return the most similar names, joined by commas."""
    found = difflib.get_close_matches(name, sorted(filter(None, names)), n=MOST_NAMES, cutoff=0.5)
    return ", ".join(found)
