"""The computation of one fixed module: its tensors moved or up-cast, its functions replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from numerics.errors import NumericsError
from numerics.fixes.contexts import ModuleState, ReplacedFunctions, swapped_tensors
from numerics.fixes.conversion import SMALL, UPCAST, Conversion
from numerics.fixes.multi_head import Replacement
from numerics.fixes.passes import DISCARDED, LISTENERS, running
from numerics.fixes.replay import Autocast, Finish, device_types, forked_rng, replayed
from numerics.fixes.results import opened
from numerics.fixes.small import SMALL as SMALL_FUNCTIONS

DEEPEST = 4  # levels of an argument's attributes in which tensors are looked for
Around = Callable[[], AbstractContextManager[Any]]


@dataclass
class Computation:
    """How a fixed module computes. function: the fix is of its calls within the module; "": of the whole module.

    around: a further context of the computation. called: names of the functions that were called within. moved:
    whether tensors came from another device.
    """

    path: str
    kind: str
    function: str = ""
    around: Around = contextlib.nullcontext
    called: set[str] = field(default_factory=set)
    calls: int = 0
    moved: bool = False
    dtypes: dict[Any, list[torch.dtype]] = field(default_factory=dict)  # of the results, as without the fix

    def run(
        self, module: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return forward(*args, **kwargs) of the module, fixed."""
        self.calls += 1
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise NumericsError(
                f"{self.path} is called within a function of torch.func, such as vmap or grad, where no fix works; "
                "fix: name a module around it"
            )
        leaves, form = tree_flatten((tuple(args), dict(kwargs)))
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        parameters = list({id(one): one for one in module.parameters()}.values())
        held = _held(leaves)
        state = ModuleState(module)
        if torch.is_grad_enabled() and any(one.requires_grad for one in held.values()):
            raise self._exchange()
        results: list[Any] = []  # leaves of the results, and how to build these
        tensors = [*(leaves[place] for place in places), *parameters]
        dtypes = self._result_dtypes(lambda: forward(*args, **kwargs), tensors, state)

        def compute(given: Sequence[Tensor], first: bool, finish: Finish) -> Any:
            conversion = Conversion.of("" if self.function else self.kind, given)
            self.moved |= conversion.home is not None
            inputs = list(leaves)
            for place, tensor in zip(places, given, strict=False):
                inputs[place] = conversion.into(tensor)
            others = [conversion.into(one) for one in given[len(places) :]]
            swapped = {id(one): other for one, other in zip(parameters, others, strict=True)}
            with (
                self._buffers(module, conversion) if first else state.restored(conversion.into) as buffers,
                swapped_tensors(module, swapped | (buffers or {}), keep_assigned=first),
                self.around(),
                self._functions(),
                conversion.context(),
            ):
                versions = [_version(one) for one in inputs]
                new_args, new_kwargs = tree_unflatten(inputs, form)
                flat, build = opened(forward(*new_args, **new_kwargs))
                if any(isinstance(one, Iterator) for one in flat):
                    raise self._generator()
                for leaf, one, version in zip(leaves, inputs, versions, strict=True):
                    if one is not leaf and _version(one) != version:
                        raise self._overwritten()
                if first:
                    results[:] = [[Tensor if isinstance(one, Tensor) else one for one in flat], build]
                return finish(conversion.back([one for one in flat if isinstance(one, Tensor)], dtypes))

        outputs = iter(replayed(compute, tensors))
        if held.keys() != _held(leaves).keys():
            raise self._exchange()
        flat, build = results
        return build([next(outputs) if one is Tensor else one for one in flat])

    def _result_dtypes(
        self, original: Callable[[], Any], tensors: Sequence[Tensor], state: ModuleState
    ) -> Sequence[torch.dtype]:
        """Return the formats of the results without the fix, from one further call; empty where they stay wide.

        Under autocast they stay wide: the functions that follow accept any format.
        """
        if self.kind != UPCAST or self.function or Autocast(device_types(tensors)).enabled:
            return ()
        key = tuple(tensor.dtype for tensor in tensors)
        if key not in self.dtypes:
            with (
                torch.no_grad(),
                forked_rng(tensors),
                state.restored(lambda one: one),
                running(DISCARDED),
            ):
                self.dtypes[key] = [one.dtype for one in opened(original())[0] if isinstance(one, Tensor)]
        return self.dtypes[key]

    @contextlib.contextmanager
    def _buffers(self, module: nn.Module, conversion: Conversion) -> Iterator[dict[int, Tensor]]:
        """Yield id of each buffer -> its converted copy. Changes are copied back."""
        found = list({id(one): one for one in module.buffers()}.values())
        copies = [conversion.into(one) for one in found]
        yield {id(one): copy for one, copy in zip(found, copies, strict=True)}
        for one, copy in zip(found, copies, strict=True):
            if copy is not one:
                with torch.no_grad():
                    one.copy_(copy)

    def _functions(self) -> AbstractContextManager[Any]:
        """Return the context in which functions are replaced."""
        replacements: dict[str, Replacement] = {}
        if self.kind == SMALL:
            names = [self.function] if self.function else list(SMALL_FUNCTIONS)
            replacements = {name: _small(name) for name in names}
        elif self.function:
            replacements = {self.function: self._converted}
        else:
            return contextlib.nullcontext()
        return ReplacedFunctions(replacements, self.called)

    def _converted(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function with converted tensors."""
        leaves, form = tree_flatten((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        conversion = Conversion.of(self.kind, tensors)
        self.moved |= conversion.home is not None
        dtypes: list[torch.dtype] = []
        if conversion.wide and not Autocast(device_types(tensors)).enabled:
            with torch.no_grad(), forked_rng(tensors), running(DISCARDED):
                plain = tree_flatten(func(*args, **kwargs))[0]
            dtypes = [one.dtype for one in plain if isinstance(one, Tensor)]
        inputs = [conversion.into(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        with conversion.context():
            new_args, new_kwargs = tree_unflatten(inputs, form)
            flat, structure = tree_flatten(func(*new_args, **new_kwargs))
        outputs = iter(conversion.back([one for one in flat if isinstance(one, Tensor)], dtypes))
        return tree_unflatten([next(outputs) if isinstance(one, Tensor) else one for one in flat], structure)

    def _exchange(self) -> NumericsError:
        return NumericsError(
            f"{self.path} reads or sets tensors of an object among its arguments, whose gradient a fix would lose; "
            "fix: name modules that exchange tensors as arguments and results alone"
        )

    def _generator(self) -> NumericsError:
        return NumericsError(
            f"{self.path} returns a generator, which computes after the fix has ended; fix: return a list or a tuple, "
            "or name a module around it"
        )

    def _overwritten(self) -> NumericsError:
        return NumericsError(
            f"{self.path} overwrites one of its arguments, which a fix would lose; fix: name a module around it"
        )


def _small(name: str) -> Replacement:
    def compute(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for listener in LISTENERS:
            listener(func, args, kwargs)
        return SMALL_FUNCTIONS[name](*args, **kwargs)

    return compute


def _version(value: Any) -> int:
    """Return how often a tensor was overwritten; 0 where torch does not count."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _held(leaves: Sequence[Any]) -> dict[int, Tensor]:
    """Return the tensors that objects among the arguments hold, by id."""
    found: dict[int, Tensor] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif depth < DEEPEST:
            inner: Sequence[Any] = ()
            if isinstance(value, dict):
                inner = list(value.values())
            elif isinstance(value, (list, tuple)):
                inner = value
            elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
                inner = list(vars(value).values())
            for one in inner:
                look(one, depth + 1)

    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            look(leaf, 0)
    return found
