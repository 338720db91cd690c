"""Describe a model, an optimizer, data and random states for a checklist."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from numerics.describe import NoValuesError, module_settings
from numerics.errors import NumericsError
from numerics.record.tensor_digest import digest
from numerics.setup.checklist_rows import NO_DIGEST
from numerics.setup.checklist_zip import FIRST_FORWARD, Table

# Names that wrappers put into the path of a module.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def canonical_name(name: str) -> str:
    """Return a module's path without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model within DistributedDataParallel and alike."""
    while isinstance(inner := getattr(model, "module", None), nn.Module) and len(list(model.children())) == 1:
        model = inner
    return model


def describe_modules(model: nn.Module) -> Table:
    """Return path -> class, settings, representation and mode of each module."""
    found: Table = {}
    for name, module in model.named_modules():
        if any(child in WRAPPERS for child, _ in module.named_children()):
            continue  # the wrapped module has its name
        settings = {key: str(value) for key, value in module_settings(module).items()}
        found[canonical_name(name) or "(model)"] = {**settings, "representation": module.extra_repr()}
    return found


def describe_parameters(model: nn.Module) -> Table:
    """Return name -> shape, dtype, digest and norm of each parameter and buffer. Tied ones name their first name."""
    found: Table = {}
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for full, tensor in tensors:
            name, lazy = canonical_name(full), is_lazy(tensor)
            found[name] = {
                "kind": kind,
                "shape": "not initialised"
                if lazy
                else "nested"
                if tensor.is_nested
                else str(tuple(tensor.shape)),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "trained": str(tensor.requires_grad),
                "tied": first.get(id(tensor), ""),
            }
            if id(tensor) not in first and not lazy:
                first[id(tensor)] = name
                found[name] |= {"digest": tensor_digest(tensor), "norm": _norm(tensor)}
    return found


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's values in row-major order; NO_DIGEST and a reason where it has none."""
    try:
        if hasattr(tensor, "placements"):
            raise NoValuesError("this rank has a part of it")
        return f"{int(digest(tensor)) % (1 << 64):016x}"
    except (NoValuesError, RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{NO_DIGEST} of a {tensor.layout} tensor on {tensor.device.type}: {reason}"


def _norm(tensor: Tensor) -> str:
    if not tensor.is_floating_point() or tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        return ""
    value = tensor.detach()
    return f"{float(torch.linalg.vector_norm(value.float() if value.element_size() < 4 else value)):.6g}"


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[str, str]:
    """Return the class and the settings of each parameter group, with the number and the names' digest."""
    named = model.named_parameters() if model is not None else ()
    names = {id(value): canonical_name(name) for name, value in named}
    found = {"optimizer": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        members = sorted(names.get(id(value), "?") for value in group["params"])
        found |= {
            f"optimizer.group{number}.{key}": str(value) for key, value in group.items() if key != "params"
        }
        code = hashlib.sha256("\n".join(members).encode()).hexdigest()[:12]
        found[f"optimizer.group{number}.parameters"] = f"{len(members)} parameters ({code})"
    return found


def describe_inputs(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return place -> type, shape and digest of the inputs of the first forward pass."""
    return {
        f"{FIRST_FORWARD}, input {number}": f"{tensor.dtype} {tuple(tensor.shape)} digest {tensor_digest(tensor)}"
        for number, tensor in enumerate(tensors)
    }


def describe_data(data: Iterable[str | os.PathLike[str]] | Mapping[str, Any]) -> dict[str, str]:
    """Return name -> digest. data: files or folders, or name -> file, folder, tensor or array."""
    if isinstance(data, str | os.PathLike):
        data = [data]
    named = data.items() if isinstance(data, Mapping) else ((Path(path).name, path) for path in data)
    found: dict[str, str] = {}
    for name, value in named:
        if isinstance(value, str | os.PathLike):
            found |= dict(_files(str(name), Path(value)))
        else:
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
            found[str(name)] = f"{tuple(tensor.shape)} digest {tensor_digest(tensor)}"
    return found


def _files(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of a file, or of each file in a folder."""
    try:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as content:
                code = hashlib.file_digest(content, "sha256").hexdigest()
            inner = "" if file == path else f"/{file.relative_to(path).as_posix()}"
            yield f"{name}{inner}", f"{file.stat().st_size} bytes sha256 {code}"
    except OSError as error:
        raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check its path") from error


def random_states() -> dict[str, str]:
    """Return generator -> digest of its state, and torch's seed."""
    python, numpys = random.getstate(), numpy.random.get_state(legacy=False)
    numpys = {
        **numpys,
        "state": {name: str(numpy.asarray(value).tolist()) for name, value in numpys["state"].items()},
    }
    states = {
        "seed of torch": str(torch.initial_seed()),
        "state of torch on the CPU": tensor_digest(torch.get_rng_state()),
        "state of Python's random": hashlib.sha256(repr(python).encode()).hexdigest()[:16],
        "state of numpy": hashlib.sha256(repr(numpys).encode()).hexdigest()[:16],
    }
    device = torch.accelerator.current_accelerator(check_available=True)
    module: Any = torch.get_device_module(device) if device else None
    if module and getattr(module, "is_initialized", lambda: True)():
        for number in range(module.device_count()):
            states[f"state of device {number}"] = tensor_digest(module.get_rng_state(number))
    return states
