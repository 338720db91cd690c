"""Describe a model, an optimizer, data and random states as the tables of a checklist: entry -> value."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from referee.errors import NumericsError
from referee.numerics.describe import NoValuesError, module_settings
from referee.numerics.record.tensor_statistics import digest
from referee.numerics.setup.checklist_rows import NO_DIGEST

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


def describe_modules(model: nn.Module) -> dict[str, str]:
    """Return "path: setting" -> value of each module: its class, plain attributes and mode."""
    return {
        f"{canonical_name(name) or '(model)'}: {key}": str(value)
        for name, module in model.named_modules()
        if not any(child in WRAPPERS for child, _ in module.named_children())  # the inner module has its name
        for key, value in module_settings(module).items()
    }


def describe_parameters(model: nn.Module) -> dict[str, str]:
    """Return "name: form" and "name: values" of each parameter and buffer. A tied one names the first of its names."""
    found: dict[str, str] = {}
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for full, tensor in tensors:
            name = canonical_name(full)
            shape = "of unknown shape" if is_lazy(tensor) or tensor.is_nested else str(tuple(tensor.shape))
            trained = "trained" if tensor.requires_grad else "not trained"
            tied = f", tied to {first[id(tensor)]}" if id(tensor) in first else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[f"{name}: form"] = f"{kind} {dtype} {shape}, {trained}{tied}"
            if not tied and not is_lazy(tensor):
                first[id(tensor)] = name
                found[f"{name}: values"] = f"{_norm(tensor)}digest {tensor_digest(tensor)}"
    return found


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's values in row-major order; NO_DIGEST and a reason where it has none."""
    try:
        if hasattr(tensor, "placements"):
            raise NoValuesError("this rank has a part of it")
        return f"{int(digest(tensor)) % (1 << 64):016x}"
    except (NoValuesError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        return f"{NO_DIGEST} of a {tensor.layout} tensor on {tensor.device.type}: {reason}"


def _norm(tensor: Tensor) -> str:
    if not tensor.is_floating_point() or tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        return ""
    value = tensor.detach()
    return (
        f"norm {float(torch.linalg.vector_norm(value.float() if value.element_size() < 4 else value)):.6g}, "
    )


def describe_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[str, str]:
    """Return the class and the settings of each parameter group, with the number and the names' digest."""
    named = model.named_parameters() if model is not None else ()
    names = {id(value): canonical_name(name) for name, value in named}
    found = {"optimizer": type(optimizer).__qualname__}
    for number, group in enumerate(optimizer.param_groups):
        members = sorted(names.get(id(value), "?") for value in group["params"])
        code = hashlib.sha256("\n".join(members).encode()).hexdigest()[:12]
        settings = {**group, "params": f"{len(members)} parameters ({code})"}
        found |= {f"optimizer.group{number}.{key}": str(value) for key, value in settings.items()}
    return found


def describe_inputs(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return place -> type, shape and digest of the inputs of the first forward pass."""
    return {
        f"first forward, input {number}": f"{tensor.dtype} {tuple(tensor.shape)} digest {tensor_digest(tensor)}"
        for number, tensor in enumerate(tensors)
    }


def describe_files(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of a file, or of each file in a folder."""
    try:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as content:
                code = hashlib.file_digest(content, "sha256").hexdigest()
            name = file.relative_to(path.parent).as_posix()
            yield name, f"{file.stat().st_size} bytes sha256 {code}"
    except OSError as error:
        raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check its path") from error


def random_states() -> dict[str, str]:
    """Return generator -> digest of its state, and torch's seed."""
    name, keys, *position = numpy.random.get_state()
    texts = {"Python's random": repr(random.getstate()), "numpy": f"{name} {list(keys)} {position}"}
    states = {
        "seed of torch": str(torch.initial_seed()),
        "state of torch on the CPU": tensor_digest(torch.get_rng_state()),
        **{f"state of {key}": hashlib.sha256(text.encode()).hexdigest()[:16] for key, text in texts.items()},
    }
    device = torch.accelerator.current_accelerator(check_available=True)
    module: Any = torch.get_device_module(device) if device else None
    if module and getattr(module, "is_initialized", lambda: True)():
        for number in range(module.device_count()):
            states[f"state of device {number}"] = tensor_digest(module.get_rng_state(number))
    return states
