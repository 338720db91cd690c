"""Test the restriction to fused attention: with the CPU's kernel, without any kernel, and on a simulated GPU."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime import attention_kernels
from runtime.attention_kernels import attention_context, check_attention
from runtime.gpu_specs import TARGETS, TargetError
from runtime.resolved_target import ResolvedTarget

CPU = ResolvedTarget(TARGETS["cpu"], "cpu", "a CPU", 2**34, "float32", "flash", None, "2.13.0")
RECENT_CUDNN = 91501
NUMBERS = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}  # torch's numbers of the kernels


@pytest.fixture(autouse=True)
def _switches_stay_as_they_were() -> Iterator[None]:
    before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    yield
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())


def gpu(name: str, dtype: str = "bfloat16") -> ResolvedTarget:
    return dataclasses.replace(
        CPU, target=TARGETS[name], device="cuda:0", device_name=name, dtype=dtype, attention_backend="none"
    )


class TorchOnHopper:
    """Stands in for torch._fused_sdp_choice: the first call in a process sets cuDNN as the first kernel."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *qkv: torch.Tensor, is_causal: bool) -> int:
        if not self.calls:
            torch._C._set_sdp_priority_order(
                [NUMBERS[name] for name in ("cudnn", "flash", "efficient", "math")]
            )
        self.calls += 1
        return int(torch._C._get_sdp_priority_order()[0])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchOnHopper]:
    """Simulate a new process with torch on a Hopper GPU: its tensors are on the CPU."""
    order, choice, to = torch._C._get_sdp_priority_order(), TorchOnHopper(), torch.Tensor.to
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: RECENT_CUDNN)
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda self, device, *rest: to(self, "cpu" if device == "cuda:0" else device, *rest),
    )
    attention_kernels.set_default_order.cache_clear()
    yield choice
    attention_kernels.set_default_order.cache_clear()
    torch._C._set_sdp_priority_order(order)


def attend(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> torch.Tensor:
    q = torch.randn(1, 2, 32, 16, dtype=dtype, requires_grad=True)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=dropout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "head_size", "block_size"), [(6, 32, 128), (2, 32, 16), (12, 64, 1024), (1, 80, 7)]
)
def test_the_fused_cpu_kernel_passes_the_check(
    dtype: str, heads: int, head_size: int, block_size: int
) -> None:
    resolved = dataclasses.replace(CPU, dtype=dtype)
    assert check_attention(resolved, heads, head_size, block_size) == resolved


def test_no_call_in_the_context_takes_the_math_path() -> None:
    name = "ScaledDotProductFlashAttention"
    with attention_context(CPU):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            function = attend(dtype).grad_fn
            assert function is not None
            assert function.name().startswith(name)
        with (
            pytest.warns(UserWarning, match=r"not used|dropout"),
            pytest.raises(RuntimeError, match="No available kernel"),
        ):
            attend(dropout=0.1)
    attend(dropout=0.1)  # outside, torch may do as it likes


def test_with_dropout_a_cpu_takes_the_math_path_with_a_note() -> None:
    got = check_attention(CPU, 2, 16, 32, dropout=0.1)
    assert got.attention_backend == "math"
    assert got.note is not None
    assert "CONFIG_GPT2_DROPOUT" in got.note
    with attention_context(CPU, dropout=0.1):
        attend(dropout=0.1)
        function = attend().grad_fn  # evaluation has no dropout
        assert function is not None
        assert "Flash" in function.name()


@pytest.mark.parametrize("name", [name for name, row in TARGETS.items() if row.kind in ("cuda", "rocm")])
def test_the_math_path_is_never_allowed_on_a_gpu(hopper: TorchOnHopper, name: str) -> None:
    for dropout in (0.0, 0.1):
        with attention_context(gpu(name), dropout):
            assert not torch.backends.cuda.math_sdp_enabled()
            assert torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
            assert torch.backends.cuda.cudnn_sdp_enabled() == (TARGETS[name].kind == "cuda")


@pytest.mark.parametrize(
    ("name", "cudnn", "order"),
    [
        ("h200", RECENT_CUDNN, ["cudnn", "flash", "efficient"]),
        ("h200", 91500, ["flash", "efficient", "cudnn"]),
        ("a100-40g", RECENT_CUDNN, ["flash", "efficient", "cudnn"]),
        ("mi300x", None, ["flash", "efficient"]),
    ],
)
def test_the_order_of_a_context_applies_from_the_first_choice_of_a_process(
    hopper: TorchOnHopper, monkeypatch: pytest.MonkeyPatch, name: str, cudnn: int | None, order: list[str]
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    numbers = [NUMBERS[kernel] for kernel in order]
    for _ in range(2):
        with attention_context(gpu(name)):
            assert torch._fused_sdp_choice(*[torch.zeros(1)] * 3, is_causal=True) == numbers[0]
            assert torch._C._get_sdp_priority_order()[: len(numbers)] == numbers
        # outside, such as in the bench's plain case, torch's default order applies
        assert torch._C._get_sdp_priority_order()[0] == NUMBERS["cudnn"]
    assert hopper.calls == 3


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("No available kernel. Aborting execution."), False),
        (
            RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built."),
            False,
        ),
    ],
)
def test_out_of_memory_and_device_faults_are_not_reported_as_a_missing_kernel(
    hopper: TorchOnHopper, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, passes: bool
) -> None:
    def fail(*arguments: object, **options: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(F, "scaled_dot_product_attention", fail)
    with pytest.raises(type(error) if passes else TargetError) as caught:
        check_attention(gpu("h200"), 2, 16, 32)
    assert (caught.value is error) == passes


def test_the_profiler_observes_the_kernel_that_ran_forward_and_backward() -> None:
    observed: set[str] = set()
    with attention_context(CPU), attention_kernels.observe_kernels(observed):
        attend().sum().backward()
    assert observed == {"flash"}
    with attention_kernels.observe_kernels(observed):
        attend(dropout=0.1).sum().backward()
    assert observed == {"flash", "math"}


@pytest.mark.parametrize(
    ("operations", "kernels"),
    [
        (["aten::_scaled_dot_product_cudnn_attention", "aten::mm"], {"cudnn"}),
        (["aten::_scaled_dot_product_efficient_attention"], {"efficient"}),
        (["aten::_scaled_dot_product_flash_attention", "aten::_flash_attention_forward"], {"flash"}),
        (["aten::scaled_dot_product_attention", "aten::bmm"], set()),
        (["aten::_scaled_dot_product_attention_math"], {"math"}),
    ],
)
def test_kernels_are_recognised_by_the_names_of_torch_s_operations(
    operations: list[str], kernels: set[str]
) -> None:
    assert attention_kernels.kernels_of(operations) == kernels


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable all fused kernels, as on a W7900 without AOTriton's variable."""
    monkeypatch.setattr(
        attention_kernels,
        "attention_context",
        lambda resolved, dropout: sdpa_kernel([SDPBackend.CUDNN_ATTENTION]),
    )


@pytest.mark.parametrize(
    ("name", "dtype", "exported", "remedy"),
    [
        ("w7900", "bfloat16", "", "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"),
        ("w7900", "bfloat16", "1", "install a ROCm build of torch that has AOTriton kernels"),
        ("a100-40g", "float32", "", "CONFIG_DTYPE_AUTO=y"),
        ("a100-40g", "bfloat16", "", "install a build of torch for this card"),
    ],
)
def test_without_a_fused_kernel_the_error_names_the_fix(
    hopper: TorchOnHopper,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    dtype: str,
    exported: str,
    remedy: str,
) -> None:
    without_kernels(monkeypatch)
    monkeypatch.setenv("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", exported)
    resolved = gpu(name, dtype)
    with pytest.raises(TargetError) as refusal:
        check_attention(resolved, 2, 16, 32)
    message = str(refusal.value)
    assert message.startswith(f"{name}: no fused attention kernel supports 2 heads of 16 in {dtype} (torch: ")
    assert remedy in message
    assert "\n" not in message


@pytest.mark.parametrize("what", ["unscaled", "acausal", "nan"])
def test_a_kernel_with_wrong_results_is_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    real = F.scaled_dot_product_attention

    def wrong(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, is_causal: bool
    ) -> torch.Tensor:
        if what == "unscaled":
            return real(q, k, v, is_causal=True, scale=1.0)
        if what == "acausal":
            return real(q, k, v)
        return real(q, k, v * float("nan"), is_causal=True)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            TargetError, match=r"a CPU: the flash attention kernel's result for 1 x 32 tokens differs by"
        ):
            check_attention(dataclasses.replace(CPU, dtype=dtype), 2, 16, 32)
