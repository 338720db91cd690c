"""List the hardware targets, one row a card, and match a device to its row. Standard library only.

Memory is the total that torch reports, slightly less than the nominal size. Peaks are dense (without 2:4 sparsity)
bfloat16 matrix FLOP/s with float32 accumulation, from the vendor's papers.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field

from runtime.errors import UserError

GIB = 2**30
# Of a row's memory. A device with less is a slice of the card (MIG, a partition, a virtual GPU).
SMALLEST_SHARE = 0.9
# torch's fused kernels in order of preference; none stores a T x T matrix. Training with cuDNN is reported to be 1.7 to
# 2.3 times as fast as with flash on Hopper, and 0.8 times on an A100. kernel_order moves an old cuDNN to the end.
FUSED_CUDA = ("flash", "efficient", "cudnn")
FUSED_HOPPER = ("cudnn", "flash", "efficient")
FUSED_ROCM = ("flash", "efficient")  # both are AOTriton's
FUSED_NPU = ("fusion",)  # torch_npu's npu_fusion_attention, which scaled_dot_product_attention calls
# AOTriton's kernels for most Radeon cards are experimental; without this variable torch uses the T x T path instead.
# torch reads the variable once, at the first attention call.
AOTRITON = {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}
# An overflow becomes Inf or NaN, as on every other device; without it an NPU may saturate.
INF_NAN = {"INF_NAN_MODE_ENABLE": "1"}
DEVICE_TYPES = {
    "cuda": "cuda",
    "rocm": "cuda",
    "npu": "npu",
    "cpu": "cpu",
}  # kind -> torch's device type


class TargetError(UserError, RuntimeError):
    """The requested target does not fit the machine."""


@dataclass(frozen=True)
class Target:
    """A row. memory_bytes is None where only the machine can report it; peak_flops is None without a single value.

    patterns match a whole device name, ignoring case. attention: the allowed fused kernels in order of preference.
    environment: variables to export before the training process starts. forms: (pattern, peak_flops,
    peak_source) of form factors with another peak.
    """

    name: str
    title: str
    kind: str  # "cuda", "rocm", "npu" or "cpu"
    memory_bytes: int | None = None
    peak_flops: float | None = None
    peak_source: str = "none: the card has no row, so no utilisation is reported"
    dtype: str = "bfloat16"
    attention: tuple[str, ...] = FUSED_CUDA
    patterns: tuple[str, ...] = ()
    forms: tuple[tuple[str, float, str], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def attention_backend(self) -> str:
        """Return the preferred kernel."""
        return self.attention[0]

    def matches(self, device_name: str) -> bool:
        """Return whether a device of this name is this card."""
        return any(re.fullmatch(pattern, device_name, re.IGNORECASE) for pattern in self.patterns)

    def with_form_factor(self, device_name: str) -> Target:
        """Return this row with the peak of the device's form factor."""
        for pattern, peak_flops, peak_source in self.forms:
            if re.fullmatch(pattern, device_name, re.IGNORECASE):
                return dataclasses.replace(self, peak_flops=peak_flops, peak_source=peak_source)
        return self


_ROWS = (
    Target(
        name="a100-40g",
        title="NVIDIA A100 40 GB",
        kind="cuda",
        memory_bytes=int(39.5 * GIB),
        peak_flops=312e12,
        peak_source="NVIDIA A100 Tensor Core GPU datasheet: BFLOAT16 Tensor Core 312 TFLOPS (624 with sparsity)",
        patterns=(r"(NVIDIA )?A100-(SXM4?|PCIE)-40GB",),
    ),
    Target(
        name="a100-80g",
        title="NVIDIA A100 80 GB",
        kind="cuda",
        memory_bytes=int(79.25 * GIB),
        peak_flops=312e12,
        peak_source="NVIDIA A100 Tensor Core GPU datasheet: BFLOAT16 Tensor Core 312 TFLOPS (624 with sparsity)",
        patterns=(r"(NVIDIA )?A100-(SXM4?|PCIE)-80GB", r"(NVIDIA )?A100 80GB PCIe"),
    ),
    Target(
        name="h100",
        title="NVIDIA H100 80 GB",
        kind="cuda",
        memory_bytes=int(79.1 * GIB),
        attention=FUSED_HOPPER,
        peak_flops=989.4e12,
        peak_source="NVIDIA H100 Tensor Core GPU Architecture paper: SXM5, BF16 Tensor Core 989.4 TFLOPS dense",
        patterns=(r"(NVIDIA )?H100( 80GB HBM3| SXM5?| PCIe| NVL)?",),
        forms=(
            (
                r".* PCIe",
                756e12,
                "NVIDIA H100 Tensor Core GPU Architecture paper: PCIe, BF16 Tensor Core 756 TFLOPS dense",
            ),
            (
                r".* NVL",
                835.5e12,
                "NVIDIA H100 datasheet: NVL, BFLOAT16 Tensor Core 1,671 TFLOPS with sparsity, half of it dense",
            ),
        ),
    ),
    Target(
        name="h200",
        title="NVIDIA H200 141 GB",
        kind="cuda",
        memory_bytes=int(139.8 * GIB),
        attention=FUSED_HOPPER,
        peak_flops=989.5e12,
        peak_source="NVIDIA H200 datasheet: SXM, BFLOAT16 Tensor Core 1,979 TFLOPS with sparsity, half of it dense",
        patterns=(r"(NVIDIA )?H200( SXM5?| NVL)?",),
        forms=(
            (
                r".* NVL",
                835.5e12,
                "NVIDIA H200 datasheet: NVL, BFLOAT16 Tensor Core 1,671 TFLOPS with sparsity, half of it dense",
            ),
        ),
    ),
    Target(
        name="rtx4090",
        title="NVIDIA GeForce RTX 4090 24 GB",
        kind="cuda",
        memory_bytes=int(23.6 * GIB),
        peak_flops=165.2e12,
        peak_source="NVIDIA Ada GPU Architecture paper: BF16 Tensor with FP32 accumulate 165.2 TFLOPS dense",
        patterns=(r"(NVIDIA )?GeForce RTX 4090",),
    ),
    Target(
        name="w7900",
        title="AMD Radeon PRO W7900 48 GB",
        kind="rocm",
        memory_bytes=int(44.98 * GIB),
        attention=FUSED_ROCM,
        peak_flops=122.6e12,
        peak_source="AMD Radeon PRO W7900 data sheet: half precision 122.6 TFLOPS; bfloat16 WMMA has the same rate",
        patterns=(r"(AMD )?Radeon (\(TM\) )?PRO W7900( Dual Slot)?",),
        environment=AOTRITON,
    ),
    Target(
        name="mi300x",
        title="AMD Instinct MI300X 192 GB",
        kind="rocm",
        memory_bytes=int(191.5 * GIB),
        attention=FUSED_ROCM,
        peak_flops=1307.4e12,
        peak_source="AMD Instinct MI300X data sheet: bfloat16 matrix 1,307.4 TFLOPS (2,614.9 with sparsity)",
        patterns=(r"(AMD )?(Instinct )?MI300X( OAM| VF| HF)?",),
    ),
    Target(
        name="910b",
        title="Huawei Ascend 910B 64 GB",
        kind="npu",
        memory_bytes=int(60.9 * GIB),
        attention=FUSED_NPU,
        peak_source="none: the peak differs by grade, so no utilisation is reported",
        patterns=(r"(Ascend ?)?910B(1|2|2C|3|4-1)",),
        environment=INF_NAN,
    ),
    Target(
        name="910c",
        title="Huawei Ascend 910C, one of its two dies with 64 GB",
        kind="npu",
        memory_bytes=int(60.9 * GIB),
        attention=FUSED_NPU,
        peak_source="none: the peak differs by grade, so no utilisation is reported",
        patterns=(r"(Ascend ?)?910_93\d\d",),
        environment=INF_NAN,
    ),
    Target(name="generic-cuda", title="an NVIDIA GPU that the table lacks", kind="cuda"),
    Target(
        name="generic-rocm",
        title="an AMD GPU that the table lacks",
        kind="rocm",
        attention=FUSED_ROCM,
        environment=AOTRITON,
    ),
    Target(
        name="generic-npu",
        title="an Ascend NPU that the table lacks",
        kind="npu",
        attention=FUSED_NPU,
        environment=INF_NAN,
    ),
    Target(
        name="cpu",
        title="the CPU",
        kind="cpu",
        dtype="float32",
        attention=("flash",),
        peak_source="none: a CPU's peak depends on clock and threads, so no utilisation is reported",
    ),
)
TARGETS = {row.name: row for row in _ROWS}


def match_target(device_name: str, memory_bytes: int, kind: str) -> Target:
    """Return the row of a device by name and total memory (0: unknown), else the generic row of its kind.

    kind: "cuda", "rocm", "npu" or "cpu". A slice of a card (MIG, a partition) gets the generic row.
    """
    if kind == "cpu":
        return TARGETS[kind]
    name = " ".join(device_name.split())
    for row in _ROWS:
        if row.kind == kind and row.matches(name):
            whole = row.memory_bytes is not None and memory_bytes >= SMALLEST_SHARE * row.memory_bytes
            if whole or not memory_bytes:
                return row.with_form_factor(name)
    return TARGETS[f"generic-{kind}"]
