"""Lists of tensors of another device: their statistics are numpy's in float64, by a fixed number of operations."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.monitor import statistics
from numerics.monitor.statistics import WIDTH, Pending
from numerics.monitor.tables import STATISTICS

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.5, -2.0, 3e-41, math.nan, math.inf, -math.inf, 65504.0, 3e38]
Found = dict[str, float]


class Operations(TorchDispatchMode):
    """Notes the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the CPU's tensors as those of CUDA."""
    monkeypatch.setattr(statistics, "fused", lambda tensor: True)


def expected(tensor: Tensor) -> Found:
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().numpy().ravel()
    if not values.size:
        return dict.fromkeys(STATISTICS, math.nan) | {"nan": 0.0, "inf": 0.0}
    with np.errstate(all="ignore"):
        return {
            "norm": float(np.sqrt(np.sum(values**2))),
            "mean": float(values.mean()),
            "min": float(values.min()),
            "max": float(values.max()),
            "std": float(values.std()),
            "zeros": float((values == 0).mean()),
            "nan": float(np.isnan(values).sum()),
            "inf": float(np.isinf(values).sum()),
        }


def found(tensors: list[Tensor]) -> list[Found]:
    pending = Pending()
    pending.add([("param", str(number)) for number in range(len(tensors))], tensors)
    moments, _ = pending.take()
    return [
        {name: moments["param", str(number)].statistic(name) for name in STATISTICS}
        for number in range(len(tensors))
    ]


def require_equal(tensors: list[Tensor], rel: float = 1e-6) -> None:
    for one, tensor in zip(found(tensors), tensors, strict=True):
        exact = expected(tensor)
        for name in ("min", "max", "nan", "inf"):
            assert one[name] == exact[name] or (math.isnan(one[name]) and math.isnan(exact[name])), name
        assert one["zeros"] == pytest.approx(exact["zeros"], abs=1e-15, nan_ok=True)
        assert one["std"] == pytest.approx(exact["std"], rel=rel, abs=1e-7 * abs(exact["mean"]), nan_ok=True)
        for name in ("norm", "mean"):
            assert one[name] == pytest.approx(exact[name], rel=rel, abs=1e-12 * exact["norm"], nan_ok=True)


@st.composite
def drawn(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    values = (
        st.one_of(st.sampled_from(SPECIAL), st.floats(-100, 100, width=32)) if draw(st.booleans()) else None
    )
    count = math.prod(shape)
    if values is None:
        low, high = draw(st.sampled_from([(-1, 1), (0, 1), (-3, -1), (99.9, 100.1)]))
        numbers = torch.rand(count, generator=torch.Generator().manual_seed(count)) * (high - low) + low
    else:
        numbers = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float64)
    tensor = numbers.to(dtype).reshape(shape)
    kind = draw(st.sampled_from(["as it is", "transposed", "with gaps", "expanded", "requires gradients"]))
    if kind == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if kind == "with gaps" and tensor.dim():
        return tensor[..., ::2]
    if kind == "expanded":
        return tensor.expand(3, *tensor.shape)
    return tensor.requires_grad_() if kind == "requires gradients" else tensor


@settings(max_examples=150, deadline=None)
@given(st.lists(drawn(), max_size=8))
def test_statistics_of_lists_are_those_of_numpy(tensors: list[Tensor]) -> None:
    require_equal([tensor.detach() for tensor in tensors])
    assert len(found(tensors)) == len(tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_tensors_are_exact_to_the_rounding_of_float64(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    normal = [torch.randn(size, generator=draw).to(dtype) for size in (300_000, 70_001, 5, 1)]
    shifted = [torch.randn(size, generator=draw).mul(0.01).add(100).to(dtype) for size in (300_000, 9)]
    require_equal([*normal, *shifted, -shifted[0].abs(), torch.zeros(4, dtype=dtype)], rel=1e-7)


def test_lists_longer_than_a_batch_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "DEVICE_BATCH", 100)
    draw = torch.Generator().manual_seed(0)
    require_equal([torch.randn(size, generator=draw) + 1 for size in (30, 60, 250, 100, 0, 1)], 1e-5)


def model(layers: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(64, 8), *[(8,), (8, 24), (24,), (8, 8), (8, 32), (32, 8)] * layers]
    return [torch.ones(shape, dtype=dtype) for shape in shapes]


def operations(tensors: list[Tensor]) -> list[str]:
    with Operations() as noted:
        found(tensors)
    return noted.names


def test_the_number_of_operations_does_not_depend_on_the_number_of_tensors() -> None:
    few, many = operations(model(2)), operations(model(20))
    assert many == few
    sizes = len({tensor.numel() for tensor in model(2)})
    assert few.count("_foreach_max") == 2 * sizes
    assert len(few) - 2 * sizes <= 30
    mixed = operations([*model(2), *model(2, torch.bfloat16)])
    assert len(mixed) <= 2 * len(few)


def test_a_step_is_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    found(model(1))
    transfers = []
    to_list = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: (transfers.append(tensor.shape), to_list(tensor))[1])
    pending = Pending()
    pending.add([("param", str(number)) for number in range(13)], model(2))
    pending.add([("actv", "x")], [torch.ones(3)])
    pending.add_values([("update_ratio", "x")], torch.ones(1, 1))
    assert not transfers
    pending.take()
    assert transfers == [(15, WIDTH)]
