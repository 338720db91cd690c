"""Name what the code of a variant changes outside of itself: loaded functions and classes, settings, the process.

Losses and counts of a run are computed in the process that runs the variant, by functions that were loaded before it.
A variant that replaces one of them, or a setting that they depend on, is refused.
"""

from __future__ import annotations

import builtins
import locale
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

OURS = {"gpt2", "referee", "ra", "runtime", "study"}  # of their modules constants count, too
VALUES = (classmethod, property, torch.dtype)  # that are no callables, and count
WATCHED = OURS | {"torch", "numpy"} | sys.stdlib_module_names
# libraries, and torch itself, replace functions of these when they are imported
WRAPPING = (
    "torch._compile",
    "torch._dynamo.",
    "torch.optim.optimizer",
)  # optimizers are wrapped at their first use
UNWATCHED = {"inspect", "logging", "sys", "threading", "torch.compiler._cache", "warnings"}
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch.compile sets it
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FIX = "compute within the module, and leave torch, numpy and the process as they are"


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _streams() -> list[Any]:
    files = [os.fstat(number) for number in range(3)]
    return [sys.stdin, sys.stdout, sys.stderr, [(file.st_dev, file.st_ino) for file in files]]


def _hooks() -> list[Any]:
    named = [*vars(torch_module).items(), *vars(torch_optimizer).items()]
    return [(name, [*value.items()]) for name, value in named if name.endswith("_hooks")]


def _backends() -> list[Any]:
    backends, cuda, cudnn = torch.backends, torch.backends.cuda, torch.backends.cudnn
    attention = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    chosen = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, backends.mkldnn.enabled)
    return [attention, cuda.cudnn_sdp_enabled(), chosen, torch.get_float32_matmul_precision()]


def _autograd() -> list[Any]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    return [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), hooks]


def _autocast() -> list[Any]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


SETTINGS: dict[str, Callable[[], Any]] = {
    "the current folder": os.getcwd,
    "the umask": _umask,
    "the environment": lambda: {name: text for name, text in os.environ.items() if name != COMPILER_CACHE},
    "the handlers of signals": lambda: [signal.getsignal(number) for number in HANDLED],
    "standard input or output": _streams,
    "the tracing of Python": lambda: [sys.gettrace(), sys.getprofile()],
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "numpy's handling of errors": np.geterr,
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "torch's number of threads": torch.get_num_threads,
    "torch's deterministic mode": torch.get_deterministic_debug_mode,
    "torch's autograd": _autograd,
    "torch's autocast": _autocast,
    "torch's backends": _backends,
    "torch's denormal numbers": lambda: float(torch.tensor(1e-40) * 1),
    "torch's modes": lambda: [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
    "torch's global hooks": _hooks,
    "torch's kernels": lambda: {name for name in torch.library._impls if name.startswith("aten/")},
}
TORCH = "torch's random numbers"
GENERATORS: dict[str, Callable[[], Any]] = {
    TORCH: lambda: torch.default_generator.get_state().tolist(),
    "numpy's random numbers": lambda: repr(np.random.get_state()),
    "Python's random numbers": random.getstate,
}


class GlobalState:
    """A snapshot. It has no part in modules that are loaded later, nor in names that are added and hide no other."""

    def __init__(self, generators: bool = True) -> None:
        """generators: whether the state of random numbers counts."""
        loaded = [*sys.modules.items()]
        self._modules = {name: module for name, module in loaded if _watched(name)}
        self._code = [(name, owner, _code(name, owner)) for name, owner in _owners(self._modules)]
        self._read = SETTINGS | (GENERATORS if generators else {})
        self._settings = {name: read() for name, read in self._read.items()}

    def changed(self) -> str:
        """Name the first change since the snapshot; "" without one."""
        for name, value in self._settings.items():
            if self._read[name]() != value:
                return name
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return f"sys.modules[{name!r}]"
        for of, owner, before in self._code:
            now = _code(of, owner)
            for name in () if now == before else sorted(now.keys() | before.keys()):
                before_it = before[name] if name in before else _hidden(owner, name)
                if before_it is not None and now.get(name) != before_it:
                    return f"{of}.{name}"
        return ""


def _watched(module: str) -> bool:
    custom = module.startswith("ra.custom.")
    return module.partition(".")[0] in WATCHED and module not in UNWATCHED and not custom


def _owners(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the modules and the classes that they define, by name."""
    for name, module in modules.items():
        yield name, module
        for value in [*vars(module).values()]:
            if issubclass(type(value), type) and value.__module__ == name:
                yield f"{name}.{value.__qualname__}", value


def _code(of: str, owner: Any) -> dict[str, Any]:
    """Return the functions and classes of a module or a class, functions with their code; constants of this project."""
    constants = of.partition(".")[0] in OURS
    return {
        name: _inside(value)
        for name, value in [*vars(owner).items()]
        if callable(value) or type(value) in VALUES or (constants and name.isupper())
    }


def _inside(value: Any) -> Any:
    """Return a function with its code and defaults, the inner one where torch has wrapped it; else the value."""
    while type(value) is FunctionType and value.__globals__.get("__name__", "").startswith(WRAPPING):
        inner = getattr(value, "_torchdynamo_orig_callable", None) or getattr(value, "__wrapped__", None)
        if inner is None:
            break
        value = inner
    return (value, value.__code__, value.__defaults__) if type(value) is FunctionType else value


def _hidden(owner: Any, name: str) -> Any:
    """Return what a name that was added to a module or a class hides: built in, or inherited. None: nothing."""
    if not isinstance(owner, type):
        return getattr(builtins, name, None)
    bases = owner.__mro__[1:] if name == "__getattribute__" else owner.__mro__[1:-1]
    return next((_inside(vars(base)[name]) for base in bases if name in vars(base)), None)
