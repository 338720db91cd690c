"""Fix every source of randomness of a training script, sections 2.2.1 to 2.2.3. torch is loaded by `seed_all`."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

SEED = 1234
CUBLAS = ":4096:8"  # a workspace with which cuBLAS is deterministic
DETERMINISTIC_CUBLAS = (CUBLAS, ":16:8")
HCCL = {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"}
DROPOUT = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
TORCH_DROPOUT = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def process_environment(variables: Mapping[str, str] = os.environ, seed: int = SEED) -> dict[str, str]:
    """Return the variables of a deterministic process, which its parent sets before it starts.

    variables: of the parent; its CUBLAS_WORKSPACE_CONFIG remains where cuBLAS is deterministic with it.
    """
    cublas = variables.get("CUBLAS_WORKSPACE_CONFIG", "")
    cublas = cublas if cublas in DETERMINISTIC_CUBLAS else CUBLAS
    return HCCL | {"CUBLAS_WORKSPACE_CONFIG": cublas, "PYTHONHASHSEED": str(seed)}


def seed_all(seed: int = SEED, mode: bool = False, rm_dropout: bool = True) -> list[str]:
    """Seed every generator, select deterministic algorithms, disable dropout.

    Args:
        seed: of Python, numpy, torch and every device, 0 to 2**32 - 1.
        mode: deterministic computation and communication. An operation without a deterministic implementation then
            raises a RuntimeError.
        rm_dropout: let dropout modules and functions return their input, until the process ends.

    Returns and warns of what came too late to have an effect, as in "PYTHONHASHSEED: ...".
    """
    import numpy as np
    import torch

    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} is not a seed; fix: use 0 to {2**32 - 1}")
    late = []
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED") != str(seed):
        late.append(f"PYTHONHASHSEED: the order of sets is random; fix: start it with PYTHONHASHSEED={seed}")
    os.environ["PYTHONHASHSEED"] = str(seed)  # for child processes
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # of every device
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark, cudnn.deterministic = False, False, True
    if mode:
        late += _deterministic(seed)
    if rm_dropout:
        remove_dropout()
    for line in late:
        warnings.warn(line, stacklevel=2)
    return late


def _deterministic(seed: int) -> list[str]:
    """Select deterministic algorithms. Returns what came too late."""
    import torch

    late = []
    if _initialised("cuda") and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in DETERMINISTIC_CUBLAS:
        late.append(
            "CUBLAS_WORKSPACE_CONFIG: cuBLAS is initialised without it; fix: call seed_all before the first use of "
            "the GPU"
        )
    communicating = torch.distributed.is_available() and torch.distributed.is_initialized()
    if (_initialised("npu") or communicating) and os.environ.get("HCCL_DETERMINISTIC", "").lower() != "true":
        late.append(
            "HCCL_DETERMINISTIC: devices are initialised without it; fix: call seed_all before their first use and "
            "before init_process_group"
        )
    os.environ.update(process_environment(seed=seed))
    torch.use_deterministic_algorithms(True)
    return late


def _initialised(device: str) -> bool:
    import torch

    module = getattr(torch, device, None)
    return bool(module is not None and hasattr(module, "is_initialized") and module.is_initialized())


def remove_dropout() -> None:
    """Replace functional dropout and the forward of every dropout module class by the identity.

    Recurrent modules and scaled_dot_product_attention lose their probability. A function that a module imported by
    name is replaced there as well.
    """
    import torch

    functional: Any = torch.nn.functional
    attention = functional.scaled_dot_product_attention
    if hasattr(attention, "without_dropout"):
        return
    torch.overrides.resolve_name(attention)  # torch lists its functions once, before they are replaced

    def scaled_dot_product_attention(*args: Any, **options: Any) -> Any:
        """The fifth argument is dropout_p."""
        if len(args) > 4:
            return attention(*args[:4], 0.0, *args[5:], **options)
        return attention(*args, **options | {"dropout_p": 0.0})

    scaled_dot_product_attention.without_dropout = True  # type: ignore[attr-defined]
    replaced: dict[Any, Any] = {attention: scaled_dot_product_attention}
    replaced |= {getattr(functional, name): _identity for name in DROPOUT}
    for name in TORCH_DROPOUT:
        replaced |= {getattr(torch, name): _identity, getattr(torch, f"{name}_"): _identity}
    for module in list(sys.modules.values()):
        _replace_globals(module, replaced)
    nn = torch.nn
    for kind in nn.modules.dropout._DropoutNd.__subclasses__():
        kind.forward = _module_identity  # type: ignore[method-assign]
    nn.RNNBase.dropout = property(lambda self: 0.0, lambda self, value: None)  # type: ignore[assignment]


_FUNCTIONS = (type(_initialised), type(len))  # functions of Python and of C


def _replace_globals(module: Any, replaced: Mapping[Any, Any]) -> None:
    """Replace the functions among the names of a module, __main__ among them. Of torch, its public modules."""
    inner = str(getattr(module, "__name__", "")).startswith(("torch._C", "torch.overrides"))
    names = vars(module) if hasattr(module, "__dict__") and not inner else {}
    for name, value in list(names.items()):
        if type(value) in _FUNCTIONS and value in replaced:
            names[name] = replaced[value]


def _identity(input: Any, *unused: Any, **options: Any) -> Any:
    return input


def _module_identity(self: Any, input: Any) -> Any:
    return input
