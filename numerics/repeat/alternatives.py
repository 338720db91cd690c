"""Deterministic alternatives to an operation, section 2.3.2.2, after torch.use_deterministic_algorithms."""

from __future__ import annotations

import re

ALGORITHMS = "torch.use_deterministic_algorithms(True)"
ASYNCHRONOUS_USE = (
    "ASCEND_LAUNCH_BLOCKING=1 or CUDA_LAUNCH_BLOCKING=1 hides the fault until it is mended",
    "record_stream() for tensors that another stream uses; wait() for communication before its tensors are used",
    "TORCH_CUDA_SANITIZER=1 names unordered uses of memory (NVIDIA); overlap of communication off",
)
TABLE: tuple[tuple[str, str], ...] = (
    (
        r"index_add|scatter_add|scatter_reduce|index_reduce",
        f"{ALGORITHMS}; or sort the indices and use torch.segment_reduce, which adds in a fixed order",
    ),
    (
        r"index_put|put_|index_copy|scatter",
        f"{ALGORITHMS}; without it, duplicate indices are written in any order",
    ),
    (
        r"embedding.*backward|embedding_bag",
        f"{ALGORITHMS}; or compute the embedding as a product with one-hot rows",
    ),
    (r"cumsum|cumprod|bincount|histc|kthvalue|median", f"{ALGORITHMS}; or compute this operation on the CPU"),
    (
        r"scaled_dot_product|flash_attention|efficient_attention",
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH); flash attention's backward is deterministic under "
        f"{ALGORITHMS}",
    ),
    (
        r"convolution|cudnn|miopen",
        "torch.backends.cudnn.deterministic = True and torch.backends.cudnn.benchmark = False",
    ),
    (
        r"grid_sampler|upsample|max_pool.*backward|avg_pool.*backward|adaptive.*backward|fractional_max|ctc_loss|"
        r"(reflection|replication)_pad.*backward|nll_loss2d|max_unpool",
        f"{ALGORITHMS} names it if it has no deterministic kernel; then compute it on the CPU or by small operations",
    ),
    (
        r"\b(mm|addmm|bmm|baddbmm|matmul|linear|dot|mv|addmv)\b|_scaled_mm|addbmm",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts (NVIDIA), CLOSE_MATMUL_K_SHIFT=1 (Ascend)",
    ),
    (
        r"c10d|all_?reduce|reduce_scatter|all_?gather",
        "HCCL_DETERMINISTIC=true (Ascend), NCCL_ALGO=Ring and NCCL_PROTO=Simple (NVIDIA); without overlap of "
        "communication and computation",
    ),
    (
        r"bernoulli|dropout|rand|normal_|uniform_|multinomial|exponential_|poisson",
        "seed every generator (numerics.seed_all); or draw on the CPU and move the numbers to the device",
    ),
    (r"empty|resize_", "torch.zeros, or write every element before the first read"),
    (r"fused_adam|fused_sgd|fused_adagrad", "the optimizer with fused=False, foreach=False"),
    (
        r"sum|mean|norm|softmax|var|prod|logsumexp",
        f"a fixed number of threads (OMP_NUM_THREADS) on a CPU; {ALGORITHMS} elsewhere",
    ),
)


def alternatives(operation: str) -> list[str]:
    """Return what makes an operation deterministic, the most specific first; general switches where none is known.

    operation: as torch names it, such as "aten.index_add_.default".
    """
    name = operation.lower()
    found = [text for pattern, text in TABLE if re.search(pattern, name)]
    return found[:1] or [f"{ALGORITHMS}; compute the operation on the CPU or by small operations"]
