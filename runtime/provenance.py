"""Record what a run's numbers may depend on besides its configuration: versions, environment variables, code.

Standard library only at import; torch is loaded by `environment_record`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from runtime import run_record
from runtime.resolved_target import ResolvedTarget, target_record
from runtime.run_plan import RunPlan
from runtime.run_record import Environment, Fingerprint, RunRecord

ROOT = Path(__file__).resolve().parents[1]
CUSTOM = "ra.custom."  # modules of a user's variants, whose code no commit and no NUMBERS identifies
DIGITS = 16  # of a SHA-256, recorded for each module

FORMAT, ORDER = "the number format of matrix products", "the kernels or the order in which they sum"
SETS = "the order of Python's sets of strings"
OVERFLOW = "the result of an overflow on an NPU: Inf, or a saturated number"
SATURATION = "every overflow on an NPU into a saturated number"
TIMING = "the timing of operations, which hides overwritten memory"

# environment variables that change a run's numbers without a trace in its configuration -> the aspect they change
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
    "CUBLAS_WORKSPACE_CONFIG": ORDER,
    "HCCL_DETERMINISTIC": ORDER,
    "LCCL_DETERMINISTIC": ORDER,
    "CLOSE_MATMUL_K_SHIFT": ORDER,
    "INF_NAN_MODE_ENABLE": OVERFLOW,
    "INF_NAN_MODE_FORCE_DISABLE": SATURATION,
    "ASCEND_LAUNCH_BLOCKING": TIMING,
    "PYTHONHASHSEED": SETS,
    "TORCH_BLAS_PREFER_CUBLASLT": ORDER,
    "TORCH_BLAS_PREFER_HIPBLASLT": ORDER,
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": ORDER,
    "PYTORCH_TUNABLEOP_ENABLED": ORDER,
    "TORCHINDUCTOR_MAX_AUTOTUNE": ORDER,
    "HSA_OVERRIDE_GFX_VERSION": ORDER,
}


def environment_record(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the `environment` object of run.json; a component that the machine lacks is None.

    float32_matmul: torch's setting ("highest": float32 throughout, "high": TF32 where the card has it). variables:
    those of VARIABLES that are set. code: digests of the loaded modules of a user's variants.
    """
    import torch

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        numpy=_version("numpy"),
        triton=_version("triton") or _version("pytorch-triton-rocm") or _version("triton-rocm"),
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=None if cudnn is None else str(cudnn),
        float32_matmul=torch.get_float32_matmul_precision(),
        threads=torch.get_num_threads(),
        variables={name: variables[name] for name in VARIABLES if name in variables},
        code=custom_digests(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def opening_record(
    plan: RunPlan, resolved: ResolvedTarget, fingerprint: Fingerprint, parameters: int
) -> RunRecord:
    """Return the record of a run before its first step."""
    code = revision()
    return run_record.blank(plan.run, plan.arm, plan.seed).replace(
        task=plan.task,
        study=plan.study,
        commit=code.commit,
        dirty=code.dirty,
        config_sha256=plan.settings.sha256,
        fingerprint=fingerprint,
        target=run_record.RecordedTarget(**target_record(resolved)),
        environment=environment_record(),
        batch=run_record.Batch(**asdict(plan.batch)),
        parameters=parameters,
    )


def custom_digests() -> dict[str, str]:
    """Return module -> digest of its file, for the loaded modules of a user's variants."""
    digests = {}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if name.startswith(CUSTOM) and path.is_file():
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
    return digests


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Revision:
    """Full hash of the commit, and whether tracked files differ from it. Both None outside a git checkout."""

    commit: str | None
    dirty: bool | None


def revision(root: Path = ROOT) -> Revision:
    """Ask git for the revision of the checkout at `root`. A missing git or checkout is not an error."""

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip()

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return Revision(commit, None if changes is None else bool(changes))
