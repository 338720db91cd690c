"""What a run's numbers may depend on besides its configuration: versions, environment variables, the code itself.

Standard library only at import; torch is asked when a record is begun.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIGITS = 16  # of a SHA-256, kept for each module

FORMAT, ORDER = "the number format of matrix products", "the kernels or the order in which they sum"

# Environment variables that change the numbers of a run without a trace in its configuration: what each changes.
VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": FORMAT,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": FORMAT,
    "ONEDNN_DEFAULT_FPMATH_MODE": FORMAT,
    "DNNL_DEFAULT_FPMATH_MODE": FORMAT,
    "ATEN_CPU_CAPABILITY": ORDER,
    "ONEDNN_MAX_CPU_ISA": ORDER,
    "DNNL_MAX_CPU_ISA": ORDER,
    "MKL_CBWR": ORDER,
    "MKL_ENABLE_INSTRUCTIONS": ORDER,
    "MKL_NUM_THREADS": ORDER,
    "OMP_NUM_THREADS": ORDER,
    "CUBLAS_WORKSPACE_CONFIG": ORDER,
    "TORCH_BLAS_PREFER_CUBLASLT": ORDER,
    "TORCH_BLAS_PREFER_HIPBLASLT": ORDER,
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": ORDER,
    "PYTORCH_TUNABLEOP_ENABLED": ORDER,
    "TORCHINDUCTOR_MAX_AUTOTUNE": ORDER,
    "HSA_OVERRIDE_GFX_VERSION": ORDER,
}


def record(variables: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The `environment` object of run.json; what this machine does not have is null.

    float32_matmul is torch's setting ("highest": float32 throughout, "high": TF32 where the card has it). variables
    holds those of VARIABLES that are set; code the hash of every module of this project that is loaded.
    """
    import torch

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "numpy": _version("numpy"),
        "triton": _version("triton") or _version("pytorch-triton-rocm") or _version("triton-rocm"),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "variables": {name: variables[name] for name in VARIABLES if name in variables},
        "code": loaded_code(),
    }


def loaded_code(root: Path = ROOT) -> dict[str, str]:
    """Module name -> the first 16 digits of its source's SHA-256, of the loaded modules that lie in `root`.

    A module lies there if it is in the folder of its own top-level package; a virtual environment does not.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if (
            path.suffix == ".py"
            and path.is_file()
            and path.resolve().is_relative_to(root / name.split(".")[0])
        ):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
