"""Fix every source of randomness of a training script, sections 2.2.1 to 2.2.3."""

from __future__ import annotations

import os
import random
import sys
import warnings
from typing import Any

import numpy as np
import torch

CUBLAS = ":4096:8"  # a workspace with which cuBLAS is deterministic
HCCL = {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"}
DROPOUT = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = True) -> list[str]:
    """Seed every generator, select deterministic algorithms, disable dropout.

    Args:
        seed: of Python, numpy, torch and every device, 0 to 2**32 - 1.
        mode: deterministic computation and communication. An operation without a deterministic implementation then
            raises a RuntimeError.
        rm_dropout: let dropout modules and functions return their input, until the process ends.

    Returns and warns of what came too late to have an effect, as in "PYTHONHASHSEED: ...".
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} is out of range; fix: use 0 to {2**32 - 1}")
    late = []
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED") != str(seed):
        late.append(
            "PYTHONHASHSEED: this process has a random hash seed already, so the order of sets of strings is random; "
            f"fix: start it with PYTHONHASHSEED={seed}"
        )
    os.environ["PYTHONHASHSEED"] = str(seed)  # for child processes
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # of every device
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    if mode:
        late += _deterministic()
    if rm_dropout:
        remove_dropout()
    for line in late:
        warnings.warn(line, stacklevel=2)
    return late


def _deterministic() -> list[str]:
    """Select deterministic algorithms. Returns what came too late."""
    late = []
    if _initialised("cuda") and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (CUBLAS, ":16:8"):
        late.append(
            "CUBLAS_WORKSPACE_CONFIG: CUDA is initialised, so cuBLAS ignores it; fix: call seed_all before the first "
            f"use of the GPU, or set CUBLAS_WORKSPACE_CONFIG={CUBLAS}"
        )
    if _initialised("npu") and os.environ.get("HCCL_DETERMINISTIC", "").lower() != "true":
        late.append(
            "HCCL_DETERMINISTIC: the NPU is initialised; fix: set it before the process starts, or call seed_all "
            "before the first use of the NPU"
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS)
    os.environ.update(HCCL)
    torch.backends.cudnn.enabled = False
    torch.use_deterministic_algorithms(True)
    return late


def _initialised(device: str) -> bool:
    module = getattr(torch, device, None)
    return bool(module is not None and hasattr(module, "is_initialized") and module.is_initialized())


def remove_dropout() -> None:
    """Replace functional dropout and the forward of every dropout module class by the identity.

    scaled_dot_product_attention loses its dropout_p.
    """
    functional: Any = torch.nn.functional
    for name in DROPOUT:
        setattr(functional, name, _identity)
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        setattr(torch, name, _identity)
        setattr(torch, f"{name}_", _identity)
    for kind in (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d):
        kind.forward = _module_identity  # type: ignore[method-assign]
    for other in (torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout):
        other.forward = _module_identity  # type: ignore[method-assign]
    attention = functional.scaled_dot_product_attention
    if not hasattr(attention, "without_dropout"):

        def scaled_dot_product_attention(
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            *rest: Any,
            **options: Any,
        ) -> Any:
            return attention(query, key, value, attn_mask, 0.0, *rest, **options)

        scaled_dot_product_attention.without_dropout = True  # type: ignore[attr-defined]
        functional.scaled_dot_product_attention = scaled_dot_product_attention


def _identity(input: Any, *unused: Any, **options: Any) -> Any:
    return input


def _module_identity(self: Any, input: Any) -> Any:
    return input
