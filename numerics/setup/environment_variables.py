"""Environment variables that can change a run's numbers: how much, and why."""

from __future__ import annotations

from collections.abc import Mapping

from numerics.setup.checklist_rows import FATAL, HARMLESS, SUSPECT
from numerics.setup.secrets import is_secret_variable, redact

FORMAT = (FATAL, "it changes the number format of matrix products")
ORDER = (HARMLESS, "it changes the kernels or the order in which they sum: rounding only")
SPEED = (HARMLESS, "it selects devices, or changes speed or memory, not the numbers")
PROCESSES = (
    SUSPECT,
    "another number of processes is another effective batch, unless accumulation makes up for it",
)
FILES = (SUSPECT, "it can load another library, other weights, data or code of the same name")
SATURATES = (SUSPECT, "without it an NPU may saturate and no Inf or NaN appear; a GPU needs none")
BLOCKING = (SUSPECT, "with it operations are synchronous: it hides overwritten memory")
UNKNOWN = (SUSPECT, "its effect on the numbers is unknown")

# The longest beginning of a name decides; the Ascend names are those of the guide.
MEANINGS = {
    FORMAT: (
        "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE ONEDNN_DEFAULT_FPMATH_MODE "
        "DNNL_DEFAULT_FPMATH_MODE ALLOW_FP32_TO_FP16"
    ),
    SATURATES: "INF_NAN_MODE_ENABLE",
    (FATAL, "with it overflow saturates and no Inf or NaN appears"): "INF_NAN_MODE_FORCE_DISABLE",
    (SUSPECT, "sets iterate in another order: data can be shuffled differently"): "PYTHONHASHSEED",
    BLOCKING: "ASCEND_LAUNCH_BLOCKING CUDA_LAUNCH_BLOCKING",
    (SUSPECT, "with it the CPU computes operations that torch lacks for mps"): "PYTORCH_ENABLE_MPS_FALLBACK",
    PROCESSES: "WORLD_SIZE LOCAL_WORLD_SIZE",
    FILES: (
        "PYTHONPATH LD_PRELOAD LD_LIBRARY_PATH HF_ TRANSFORMERS_ DATASETS_ TORCH_HOME TORCH_EXTENSIONS "
        "CUDA_HOME CUDA_PATH ROCM_PATH ROCM_HOME ASCEND_HOME ASCEND_TOOLKIT ASCEND_OPP ASCEND_AICPU"
    ),
    SPEED: (
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES "
        "NVIDIA_VISIBLE_DEVICES TASK_QUEUE_ENABLE COMBINED_ENABLE CPU_AFFINITY_CONF PYTORCH_ALLOC_CONF "
        "PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NPU_ALLOC_CONF CUDA_DEVICE_MAX_CONNECTIONS "
        "TOKENIZERS_PARALLELISM ASCEND_GLOBAL_ ASCEND_SLOG_ TORCH_LOGS NCCL_DEBUG HCCL_LOG"
    ),
    ORDER: (
        "CUBLAS CLOSE_MATMUL_K_SHIFT LCCL_DETERMINISTIC FLASH_ATTENTION_DETERMINISTIC PYTORCH_MPS_ ATEN_ "
        "ONEDNN_ DNNL_ MKL_ OMP_ KMP_ GOMP_ OPENBLAS_ BLIS_ CUDNN_ MIOPEN_ ROCBLAS_ HIPBLAS HSA_ TORCH_BLAS_ "
        "TORCH_ROCM_ TORCHINDUCTOR_ TRITON_ PYTORCH_TUNABLEOP_ NCCL_ RCCL_ HCCL_ GLOO_ NVTE_"
    ),
    UNKNOWN: (
        "TORCH PYTORCH_ CUDA_ NVIDIA_ HIP_ ROCM_ AMD_ ASCEND_ ACL_ NPU_ TBE_ DS_ DEEPSPEED_ MEGATRON_ "
        "ACCELERATE_ FSDP_ VLLM_ SGLANG_ VERL_ FLASH_ XFORMERS_ XLA_ NUMBA_ NPY_ MINDSPEED_"
    ),
}
BEGINNINGS = {beginning: meaning for meaning, names in MEANINGS.items() for beginning in names.split()}


def variable_meaning(name: str) -> tuple[str, str]:
    """Return the grade and the reason of a variable that differs."""
    found = [beginning for beginning in BEGINNINGS if name.startswith(beginning)]
    return BEGINNINGS[max(found, key=len)] if found else UNKNOWN


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change numbers, without secrets and folders of compilers' caches."""
    return {
        name: redact(value)
        for name, value in sorted(variables.items())
        if name.startswith(tuple(BEGINNINGS))
        and not name.endswith("_CACHE_DIR")
        and not is_secret_variable(name)
    }
