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
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from numerics.checklist.checks import NO_DIGEST
from numerics.checklist.snapshot import FIRST_FORWARD, Table
from numerics.describe import NoValuesError, module_settings, parts_of
from numerics.errors import NumericsError

# Names that wrappers put into the path of a module.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
BLOCK = 1 << 20  # bytes read at once


def canonical_name(name: str) -> str:
    """Return a module's path without the names of wrappers."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    return ".".join(parts)


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
        settings = module_settings(module)
        found[canonical_name(name) or "(model)"] = {
            **{key: str(value) for key, value in settings.items()},
            "representation": module.extra_repr(),
        }
    return found


def describe_parameters(model: nn.Module) -> Table:
    """Return name -> shape, dtype, digest and norm of each parameter and buffer. Tied ones name their first name."""
    found: Table = {}
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for full, tensor in tensors:
            name = canonical_name(full)
            lazy = isinstance(tensor, UninitializedParameter | UninitializedBuffer)
            found[name] = {
                "kind": kind,
                "shape": _shape(tensor),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "trained": str(tensor.requires_grad),
                "tied": first.get(id(tensor), ""),
            }
            if id(tensor) not in first and not lazy:
                first[id(tensor)] = name
                found[name] |= {"sha256": tensor_digest(tensor), "norm": _norm(tensor)}
    return found


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's values in row-major order; NO_DIGEST and a reason where it has none.

    A sparse, nested or quantized tensor, or one of a subclass, has that of the tensors that it consists of.
    """
    digest = hashlib.sha256()
    try:
        if hasattr(tensor, "placements"):
            raise NoValuesError("this rank has a part of it")
        parts = parts_of(tensor)
        for part in parts:
            flat = part.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            if len(parts) > 1:
                digest.update(f"{tuple(part.shape)} {part.dtype} ".encode())
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()
    except (NoValuesError, RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{NO_DIGEST} of a {tensor.layout} tensor on {tensor.device.type}: {reason}"


def _shape(tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "not initialised"
    return "nested" if tensor.is_nested else str(tuple(tensor.shape))


def _norm(tensor: Tensor) -> str:
    if not tensor.is_floating_point() or tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        return ""
    value = tensor.detach()
    value = value.float() if value.element_size() < 4 else value
    return f"{float(torch.linalg.vector_norm(value)):.6g}"


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[str, str]:
    """Return the class and the settings of each parameter group, with the number and the names' digest."""
    names = (
        {id(value): canonical_name(name) for name, value in model.named_parameters()}
        if model is not None
        else {}
    )
    found = {"optimizer": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"optimizer.group{number}.{key}"] = str(value)
        members = [names.get(id(value), "?") for value in group["params"]]
        found[f"optimizer.group{number}.parameters"] = _members(members)
    return found


def _members(names: list[str]) -> str:
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]
    return f"{len(names)} parameters: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} ({digest})"


def describe_inputs(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return place -> type, shape and digest of the inputs of the first forward pass."""
    return {
        f"{FIRST_FORWARD}, input {number}": f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} "
        f"sha256 {tensor_digest(tensor)}"
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
            found[str(name)] = f"{tuple(tensor.shape)} sha256 {tensor_digest(tensor)}"
    return found


def _files(name: str, path: Path) -> Iterator[tuple[str, str]]:
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    yield f"{name}/{file.relative_to(path).as_posix()}", file_digest(file)
        else:
            yield name, file_digest(path)
    except OSError as error:
        raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check its path") from error


def file_digest(path: Path) -> str:
    """Return the size and the SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return f"{size} bytes sha256 {digest.hexdigest()}"


def _plain(value: Any) -> Any:
    """Return nested mappings of arrays and scalars as text-like values that have one representation everywhere."""
    if isinstance(value, Mapping):
        return [(name, _plain(part)) for name, part in value.items()]
    return value.tobytes() if isinstance(value, numpy.ndarray) else str(value)


def random_states() -> dict[str, str]:
    """Return generator -> digest of its state, and torch's seed."""

    def digest(state: Any) -> str:
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    states = {
        "seed of torch": str(torch.initial_seed()),
        "state of torch on the CPU": tensor_digest(torch.get_rng_state())[:16],
        "state of Python's random": digest(random.getstate()),
        "state of numpy": digest(_plain(numpy.random.get_state(legacy=False))),
    }
    device = torch.accelerator.current_accelerator(check_available=True)
    module: Any = torch.get_device_module(device) if device else None
    if device and getattr(module, "is_initialized", lambda: device.type == "mps")():
        for number in range(module.device_count()):
            states[f"state of device {number}"] = tensor_digest(module.get_rng_state(number))[:16]
    return states
