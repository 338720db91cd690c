"""Statistics equal numpy's in float64, whatever the chunks, dtypes and special values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.monitor.statistics import CPU_CHUNK, Moments, Pending, update_ratios
from numerics.monitor.tables import STATISTICS


def of(*tensors: Tensor) -> dict[str, float]:
    pending = Pending()
    for tensor in tensors:
        pending.add([("param", "x")], [tensor])
    moments, _ = pending.take()
    return {name: moments["param", "x"].statistic(name) for name in STATISTICS}


def expected(tensor: Tensor) -> dict[str, float]:
    values = tensor.double().numpy().ravel()
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


def close(found: dict[str, float], exact: dict[str, float], rel: float = 2e-5) -> None:
    # numpy's std of equal values is the rounding of their mean.
    size = max(abs(exact["min"]), abs(exact["max"]))
    least = max(1e-6, 1e-15 * size) if np.isfinite(size) else 1e-6
    assert found == pytest.approx(exact, rel=rel, abs=least, nan_ok=True)


SHAPES = [(1,), (7, 3), (3, CPU_CHUNK), (2 * CPU_CHUNK + 5,)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_statistics_are_those_of_numpy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    tensor = (torch.randn(shape, generator=draw) * 3 + 1).to(dtype)
    tensor.view(-1)[::5] = 0
    close(of(tensor), expected(tensor))
    close(of(tensor.t() if tensor.dim() == 2 else tensor.flip(0)), expected(tensor))


def test_micro_batches_are_joined_as_one_tensor() -> None:
    whole = torch.randn(10, 4000, generator=torch.Generator().manual_seed(1)) * 0.01 + 100
    close(of(*whole.split(3)), expected(whole))
    assert of(torch.ones(5, 70_000))["std"] == 0.0


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.5, -2.0, math.nan, math.inf, -math.inf, 1e30]), min_size=1, max_size=12
    )
)
def test_special_values_are_counted(values: list[float]) -> None:
    tensor, exact = (
        torch.tensor(values, dtype=torch.float64),
        expected(torch.tensor(values, dtype=torch.float64)),
    )
    close(of(tensor), exact)
    middle = len(values) // 2
    close(of(tensor[:middle], tensor[middle:]), exact)


def test_an_empty_tensor_has_no_values() -> None:
    found = of(torch.zeros(0, 3))
    assert math.isnan(found["norm"])
    assert (found["nan"], found["inf"]) == (0.0, 0.0)


def test_two_names_of_one_tensor_are_read_once_and_join_over_micro_batches() -> None:
    pending = Pending()
    for values in (torch.ones(3), torch.full((3,), 3.0)):
        pending.add([("actv", "a")], [values])
        pending.alias(("actv", "b"), ("actv", "a"))
    moments, _ = pending.take()
    assert moments["actv", "a"] == moments["actv", "b"]
    assert moments["actv", "b"].mean == 2.0
    assert pending.take() == ({}, {})


def test_moments_join_in_any_order() -> None:
    parts = [Moments(2, 1.0, 0.5, 0.0, 2.0, 2, 0, 0), Moments(3, -1.0, 2.0, -3.0, 1.0, 1, 0, 0), Moments()]
    one = parts[0].joined(parts[1]).joined(parts[2])
    other = parts[2].joined(parts[1]).joined(parts[0])
    for name in STATISTICS:
        assert one.statistic(name) == pytest.approx(other.statistic(name))


def test_update_ratios() -> None:
    before = [torch.tensor([3.0, 4.0]), torch.zeros(2), torch.zeros(2)]
    after = [torch.tensor([3.0, 9.0]), torch.zeros(2), torch.ones(2)]
    assert update_ratios([value.clone() for value in before], after).tolist() == [1.0, 0.0, math.inf]
