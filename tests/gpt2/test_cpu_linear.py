"""CPU kernels compared with torch layers: values, gradients, saved tensors, and where they are not used."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import cpu_linear

WIDE = cpu_linear.MIN_WIDTH
GELU_BY_HAND = (cpu_linear.gelu_linear, lambda x, w, b: F.linear(F.gelu(x, approximate="tanh"), w, b))
LINEAR_BY_HAND = (cpu_linear.linear, F.linear)


def sample(rows: int, columns: int, outputs: int, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, rows, columns), (outputs, columns), (outputs,))
    return [torch.randn(shape, generator=generator) * scale for shape in shapes]


def gradients(
    function: Any, tensors: list[torch.Tensor], wanted: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    """Of the sum of the squared result, after the result itself."""
    leaves = [t.clone().requires_grad_(need) for t, need in zip(tensors, wanted, strict=True)]
    y = function(*leaves)
    (y.square().sum() / 2).backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("pair", [LINEAR_BY_HAND, GELU_BY_HAND], ids=["linear", "gelu_linear"])
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.sampled_from([8, WIDE - 1, WIDE, WIDE + 5]),
    outputs=st.integers(1, 70),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_those_of_torch_layers(
    pair: tuple[Any, Any], rows: int, columns: int, outputs: int, wanted: tuple[bool, ...], seed: int
) -> None:
    tensors = sample(rows, columns, outputs, seed)
    ours = gradients(pair[0], tensors, wanted)
    exact = gradients(pair[1], [t.double() for t in tensors], wanted)
    for mine, right in zip(ours, exact, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None and right is not None:
            assert mine.dtype == torch.float32
            assert mine.is_contiguous()
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


@pytest.mark.parametrize("columns", [8, WIDE])
def test_values_without_gradients_are_bitwise_those_of_torch_layers(columns: int) -> None:
    tensors = [t.requires_grad_() for t in sample(5, columns, 33, 1)]
    trained = cpu_linear.linear(*tensors)
    with torch.no_grad():
        assert torch.equal(cpu_linear.linear(*tensors), trained)
        assert not cpu_linear.recompute_gelu(tensors[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_use_the_torch_layers(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in sample(3, WIDE, 40, 2)]
    assert torch.equal(cpu_linear.linear(*tensors), F.linear(*tensors))
    assert not cpu_linear.use_onednn(tensors[0])


def test_autocast_uses_the_torch_layers() -> None:
    tensors = sample(3, WIDE, 40, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpu_linear.linear(*tensors).dtype == torch.bfloat16
        assert not cpu_linear.recompute_gelu(tensors[0])
    assert cpu_linear.use_onednn(tensors[0])


@pytest.mark.parametrize("large", [True, False])
def test_only_a_small_gelu_is_saved_for_backward(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    x, weight, bias = (t.requires_grad_() for t in sample(6, 16, 5, 5))
    monkeypatch.setattr(cpu_linear, "MOST_SAVED", x.nbytes - large)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cpu_linear.gelu_linear(x, weight, bias)
    assert saved[:2] == [x.data_ptr(), weight.data_ptr()]
    assert len(saved) == 3 - large


def test_a_row_of_a_batch_does_not_depend_on_the_others() -> None:
    x, weight, bias = sample(7, WIDE, 48, 6)
    changed = x.clone()
    changed[1] = 9.0
    assert torch.equal(cpu_linear.linear(x, weight, bias)[0], cpu_linear.linear(changed, weight, bias)[0])
