"""Environment variables that can change a run's numbers: how much, and why."""

from __future__ import annotations

from collections.abc import Mapping

from numerics.checklist.checks import FATAL, HARMLESS, SUSPECT
from numerics.checklist.secrets import is_secret_variable, redact

FORMAT = (FATAL, "it changes the number format of matrix products")
ORDER = (HARMLESS, "it changes the kernels or the order in which they sum: rounding only")
PLACE = (HARMLESS, "it selects devices, not what they compute")
SPEED = (HARMLESS, "it changes speed or memory, not the numbers")
PROCESSES = (
    SUSPECT,
    "another number of processes is another effective batch, unless accumulation makes up for it",
)
LIBRARIES = (SUSPECT, "it can load another library or module of the same name")
FILES = (SUSPECT, "it can load other weights, data or code from a cache")
UNKNOWN = (SUSPECT, "its effect on the numbers is unknown")

# Exact names; the Ascend ones are those of the guide.
VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": FORMAT,
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": FORMAT,
    "ONEDNN_DEFAULT_FPMATH_MODE": FORMAT,
    "DNNL_DEFAULT_FPMATH_MODE": FORMAT,
    "ALLOW_FP32_TO_FP16": FORMAT,
    "INF_NAN_MODE_ENABLE": (
        SUSPECT,
        "without it an NPU may saturate and no Inf or NaN appear; a GPU needs none",
    ),
    "INF_NAN_MODE_FORCE_DISABLE": (FATAL, "with it overflow saturates and no Inf or NaN appears"),
    "PYTHONHASHSEED": (SUSPECT, "sets iterate in another order: data can be shuffled differently"),
    "CUBLAS_WORKSPACE_CONFIG": ORDER,
    "CLOSE_MATMUL_K_SHIFT": ORDER,
    "HCCL_DETERMINISTIC": ORDER,
    "LCCL_DETERMINISTIC": ORDER,
    "NCCL_DETERMINISTIC": ORDER,
    "FLASH_ATTENTION_DETERMINISTIC": ORDER,
    "PYTORCH_ENABLE_MPS_FALLBACK": (SUSPECT, "with it the CPU computes operations that torch lacks for mps"),
    "PYTORCH_MPS_FAST_MATH": ORDER,
    "PYTORCH_MPS_PREFER_METAL": ORDER,
    "PYTORCH_MPS_METAL_VERSION": ORDER,
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": SPEED,
    "PYTORCH_MPS_LOW_WATERMARK_RATIO": SPEED,
    "ASCEND_LAUNCH_BLOCKING": (SUSPECT, "with it operations are synchronous: it hides overwritten memory"),
    "CUDA_LAUNCH_BLOCKING": (SUSPECT, "with it operations are synchronous: it hides overwritten memory"),
    "CUDA_VISIBLE_DEVICES": PLACE,
    "HIP_VISIBLE_DEVICES": PLACE,
    "ROCR_VISIBLE_DEVICES": PLACE,
    "ASCEND_RT_VISIBLE_DEVICES": PLACE,
    "NVIDIA_VISIBLE_DEVICES": PLACE,
    "WORLD_SIZE": PROCESSES,
    "LOCAL_WORLD_SIZE": PROCESSES,
    "PYTHONPATH": LIBRARIES,
    "LD_PRELOAD": LIBRARIES,
    "LD_LIBRARY_PATH": LIBRARIES,
    "TASK_QUEUE_ENABLE": SPEED,
    "COMBINED_ENABLE": SPEED,
    "CPU_AFFINITY_CONF": SPEED,
    "PYTORCH_ALLOC_CONF": SPEED,
    "PYTORCH_CUDA_ALLOC_CONF": SPEED,
    "PYTORCH_HIP_ALLOC_CONF": SPEED,
    "PYTORCH_NPU_ALLOC_CONF": SPEED,
    "CUDA_DEVICE_MAX_CONNECTIONS": SPEED,
    "TOKENIZERS_PARALLELISM": SPEED,
}
# The longest matching beginning decides.
BEGINNINGS = {
    **dict.fromkeys(
        ("ATEN_", "ONEDNN_", "DNNL_", "MKL_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "CUBLAS", "CUDNN_"),
        ORDER,
    ),
    **dict.fromkeys(
        ("MIOPEN_", "ROCBLAS_", "HIPBLAS", "HSA_", "TORCH_BLAS_", "TORCH_ROCM_", "TORCHINDUCTOR_", "TRITON_"), ORDER
    ),
    **dict.fromkeys(("PYTORCH_TUNABLEOP_", "NCCL_", "RCCL_", "HCCL_", "GLOO_", "NVTE_"), ORDER),
    **dict.fromkeys(("HF_", "TRANSFORMERS_", "DATASETS_", "TORCH_HOME", "TORCH_EXTENSIONS"), FILES),
    **dict.fromkeys(
        ("TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "HIP_", "ROCM_", "AMD_", "ASCEND_", "ACL_", "NPU_", "TBE_"), UNKNOWN
    ),
    **dict.fromkeys(("DS_", "DEEPSPEED_", "MEGATRON_", "ACCELERATE_", "FSDP_", "VLLM_", "SGLANG_", "VERL_"), UNKNOWN),
    **dict.fromkeys(("FLASH_", "XFORMERS_", "XLA_", "NUMBA_", "NPY_", "MINDSPEED_"), UNKNOWN),
    # places of installed toolkits
    **dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "ROCM_HOME", "ASCEND_HOME", "ASCEND_TOOLKIT"), LIBRARIES),
    **dict.fromkeys(("ASCEND_OPP", "ASCEND_AICPU"), LIBRARIES),
    **dict.fromkeys(("ASCEND_GLOBAL_", "ASCEND_SLOG_", "TORCH_LOGS", "NCCL_DEBUG", "HCCL_LOG"), SPEED),
}  # fmt: skip


def meaning(name: str) -> tuple[str, str]:
    """Return the grade and the reason of a variable that differs."""
    if name in VARIABLES:
        return VARIABLES[name]
    found = [beginning for beginning in BEGINNINGS if name.startswith(beginning)]
    return BEGINNINGS[max(found, key=len)] if found else UNKNOWN


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change numbers, without secrets."""
    return {
        name: redact(value)
        for name, value in sorted(variables.items())
        if (name in VARIABLES or name.startswith(tuple(BEGINNINGS))) and not is_secret_variable(name)
    }
