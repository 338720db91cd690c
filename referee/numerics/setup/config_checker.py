"""Pack what can change a run's numbers on this machine: `ConfigChecker` in a training script (sections 2.1 and 4.8)."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from referee.errors import NumericsError
from referee.numerics.describe import NoValuesError, device_name, module_settings, tensors_in
from referee.numerics.monitor.targets import model_names
from referee.numerics.record.tensor_statistics import digest
from referee.numerics.setup.checklist_rows import NO_DIGEST, write_checklist
from referee.numerics.setup.script_settings import (
    add_setting,
    leaves,
    options,
    relevant_variables,
    script_settings,
)
from referee.numerics.text_files import this_rank


def describe_modules(model: nn.Module) -> dict[str, str]:
    """Return "path: setting" -> value of each module: its class, plain attributes and mode."""
    plain = model_names(model)
    modules = {plain(path): module for path, module in model.named_modules()}  # of a wrapper the module in it
    return {
        f"{name or '(model)'}: {key}": str(value)
        for name, module in modules.items()
        for key, value in module_settings(module).items()
    }


def describe_parameters(model: nn.Module) -> dict[str, str]:
    """Return "name: form" and "name: values" of each parameter and buffer. A tied one names the first of its names."""
    found: dict[str, str] = {}
    first: dict[int, str] = {}
    plain = model_names(model)
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for full, tensor in tensors:
            name = plain(full)
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
    plain = model_names(model)
    names = {id(value): plain(name) for name, value in named}
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


class ConfigChecker:
    """Pack this machine's checklist into a zip, with the interface of msProbe's ConfigChecker.

    Args:
        model: packs module tree, parameters and random states; its first forward pass adds the inputs' digests.
        shell_path: scripts and configuration files of the training; their digests and hyperparameters are packed.
        output_zip_path: the zip. In a distributed run rank 0 alone writes it.
        optimizer, data: its settings are packed; files and folders whose digests are.
        hyperparameters: further settings, such as those of argparse; nested ones by dotted path.
    """

    _start: dict[str, str] | None = None  # random states at apply_patches

    def __init__(
        self,
        model: nn.Module | None = None,
        shell_path: str | Sequence[str] | None = None,
        output_zip_path: str | os.PathLike[str] = "./config_check_pack.zip",
        fmk: str = "pytorch",
        *,
        optimizer: torch.optim.Optimizer | None = None,
        data: Iterable[str | os.PathLike[str]] | None = None,
        hyperparameters: Mapping[str, Any] | argparse.Namespace | None = None,
    ) -> None:
        _check_framework(fmk)
        self.path = Path(output_zip_path)
        if this_rank() != 0:
            return
        paths = [shell_path] if isinstance(shell_path, str | os.PathLike) else shell_path or ()
        sources = {name: _read(path) for name, path in _unique(map(Path, paths)).items()}
        settings = _settings(sources, hyperparameters)
        tables: dict[str, dict[str, str] | None] = {
            "machine": machine(),
            "environment": relevant_variables(os.environ),
            "packages": packages(),
            "data": dict(entry for path in data for entry in describe_files(Path(path))) if data else None,
            "scripts": {name: _digest(text) for name, text in sources.items()},
        }
        if model is not None:
            at_start = {f"{name}, at the start": text for name, text in (self._start or {}).items()}
            tables["model"], tables["weights"] = describe_modules(model), describe_parameters(model)
            tables["random"] = at_start | random_states()
        if optimizer is not None:
            for key, value in describe_optimizer(optimizer, model).items():
                add_setting(settings, key, value)
        tables["hyperparameters"] = {name: " and ".join(sorted(values)) for name, values in settings.items()}
        self.tables = {name: table for name, table in tables.items() if table}
        write_checklist(self.tables, self.path)
        if model is not None:
            self._hook = model.register_forward_pre_hook(
                torch.compiler.disable(self._first_forward), with_kwargs=True
            )

    def _first_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Add the inputs of the first forward pass to the zip."""
        self._hook.remove()
        self.tables["data"] = self.tables.get("data", {}) | describe_inputs(tensors_in((args, kwargs)))
        write_checklist(self.tables, self.path)

    @classmethod
    def apply_patches(cls, fmk: str = "pytorch") -> None:
        """Note the random states at the start of a script, which the zip then has as well."""
        _check_framework(fmk)
        cls._start = random_states()


def _check_framework(name: str) -> None:
    if name != "pytorch":
        raise NumericsError(f"fmk is {name!r}, only 'pytorch' is supported; fix: remove fmk")


def machine() -> dict[str, str]:
    """Return versions and switches of torch on this machine, by the names of run.json where it has them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": str(torch.version.cuda or "none"),
        "rocm": str(torch.version.hip or "none"),
        "cudnn": str(cudnn.version() if cudnn.is_available() else "none"),
        "device": _device(),
        "threads": str(torch.get_num_threads()),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "TF32 of convolutions": str(cudnn.allow_tf32) if torch.cuda.is_available() else "no CUDA device",
        "reduced-precision sums of float16": str(matmul.allow_fp16_reduced_precision_reduction),
        "reduced-precision sums of bfloat16": str(matmul.allow_bf16_reduced_precision_reduction),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "cuDNN benchmark": str(cudnn.benchmark),
    }


def _device() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    module: Any = torch.get_device_module(device) if device else None
    if device is None:
        return "CPU"
    return f"{module.device_count()} x {device_name(device.type)}"


def packages() -> dict[str, str]:
    """Return package -> version, with the commit of one that was installed from a repository."""
    found: dict[str, str] = {}
    for package in metadata.distributions():
        name = package.metadata["Name"] if package.metadata else None
        if name:
            commit = re.search(r'"commit_id":\s*"([0-9a-f]+)"', package.read_text("direct_url.json") or "")
            version = f"{package.version}{f' at {commit[1][:12]}' if commit else ''}"
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def _settings(
    sources: Mapping[str, str], given: Mapping[str, Any] | argparse.Namespace | None
) -> dict[str, set[str]]:
    """Return the settings of files, of the command line and of the caller."""
    found: dict[str, set[str]] = {}
    for name, text in sources.items():
        for key, values in script_settings(name, text).items():
            found.setdefault(key, set()).update(values)
    is_command = sys.argv[0].endswith(os.path.join("referee", "__main__.py"))
    given = vars(given) if isinstance(given, argparse.Namespace) else given or {}
    for key, value in [*(() if is_command else options(sys.argv[1:])), *leaves(given)]:
        add_setting(found, key, value)
    return found


def _read(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise NumericsError(f"{path} is not a file; fix: give scripts and configuration files")
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise NumericsError(f"{path} cannot be read: {error.strerror}; fix: check its path") from error


def _unique(paths: Iterable[Path]) -> dict[str, Path]:
    """Return name -> path; a name that is taken gets a number."""
    found: dict[str, Path] = {}
    for path in paths:
        name = path.name.encode("utf-8", "replace").decode()
        found[f"{path.stem}-{len(found) + 1}{path.suffix}" if name in found else name] = path
    return found


def _digest(text: str) -> str:
    return f"{text.count(chr(10))} lines sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
