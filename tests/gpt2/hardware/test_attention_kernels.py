"""Test the restriction to fused attention, with the CPU's kernel and without any kernel."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.hardware import attention_kernels
from gpt2.hardware.attention_kernels import attention_context, check_attention
from gpt2.hardware.gpu_specs import TARGETS, TargetError
from gpt2.hardware.resolve import ResolvedTarget

CPU = ResolvedTarget(TARGETS["cpu"], "cpu", "a CPU", 2**34, "float32", "flash", None, "2.13.0")


@pytest.fixture(autouse=True)
def _switches_stay_as_they_were() -> Iterator[None]:
    before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    yield
    assert before == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())


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


def test_the_check_does_not_change_the_random_state_of_torch() -> None:
    before = torch.get_rng_state()
    check_attention(CPU, 2, 16, 32)
    assert torch.equal(before, torch.get_rng_state())


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


@pytest.mark.parametrize("name", [name for name, row in TARGETS.items() if row.kind != "cpu"])
def test_the_math_path_is_never_allowed_on_a_gpu(name: str) -> None:
    gpu = dataclasses.replace(CPU, target=TARGETS[name], device="cuda:0", dtype="bfloat16")
    for dropout in (0.0, 0.1):
        with attention_context(gpu, dropout):
            assert not torch.backends.cuda.math_sdp_enabled()
            assert torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
            assert torch.backends.cuda.cudnn_sdp_enabled() == (TARGETS[name].kind == "cuda")


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
        ("w7900", "bfloat16", "0", "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"),
        ("w7900", "bfloat16", "1", "install a ROCm build of torch that has AOTriton kernels"),
        ("mi300x", "bfloat16", "", "install a ROCm build of torch that has AOTriton kernels"),
        ("a100-40g", "float32", "", "CONFIG_DTYPE_AUTO=y"),
        ("a100-40g", "bfloat16", "", "install a build of torch for this card"),
    ],
)
def test_without_a_fused_kernel_the_error_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, exported: str, remedy: str
) -> None:
    without_kernels(monkeypatch)
    monkeypatch.setenv("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", exported)
    real = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda self, device, *rest: real(self, "cpu" if device == "cuda:0" else device, *rest),
    )
    resolved = dataclasses.replace(CPU, target=TARGETS[name], device="cuda:0", device_name=name, dtype=dtype)
    with pytest.raises(TargetError) as refusal:
        check_attention(resolved, 2, 16, 32)
    message = str(refusal.value)
    assert message.startswith(f"{name}: no fused attention kernel supports 2 heads of 16 in {dtype} (torch: ")
    assert remedy in message
    assert "\n" not in message


def test_the_error_includes_the_reason_that_torch_gives() -> None:
    silent: list[str] = []
    with pytest.raises(RuntimeError), attention_context(CPU), attention_kernels._reasons(silent):
        attend(dropout=0.5)
    assert "Both fused kernels do not support non-zero dropout." in silent


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
        with pytest.raises(TargetError, match=r"a CPU: the flash attention kernel's result differs by"):
            check_attention(dataclasses.replace(CPU, dtype=dtype), 2, 16, 32)
