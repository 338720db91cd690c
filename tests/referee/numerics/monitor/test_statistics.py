"""Statistics equal numpy's in float64, as on a CPU and as on another device."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from referee.numerics.monitor import statistics
from referee.numerics.monitor.statistics import CPU_CHUNK, Pending
from referee.numerics.monitor.targets import STATISTICS

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.5, -2.0, math.nan, math.inf, -math.inf, 65504.0]
Found = dict[str, float]


@pytest.fixture(params=["host", "device"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the CPU's tensors as such, or as those of another device."""
    if request.param == "device":
        monkeypatch.setattr(statistics, "on_host", lambda tensor: False)


def found(tensors: list[Tensor]) -> list[Found]:
    pending = Pending()
    for number, tensor in enumerate(tensors):
        pending.add(("param", str(number)), tensor)
    moments, _ = pending.take()
    assert not pending.problems
    return [moments["param", str(number)] for number in range(len(tensors))]


def expected(tensor: Tensor) -> Found:
    values = tensor.detach().double().numpy().ravel()
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


def require_equal(tensors: list[Tensor], rel: float = 2e-5) -> None:
    for one, tensor in zip(found(tensors), tensors, strict=True):
        exact = expected(tensor)
        size = max(abs(exact["min"]), abs(exact["max"]))
        assert one == pytest.approx(
            exact, rel=rel, abs=max(1e-6, 1e-7 * size) if np.isfinite(size) else 1e-6, nan_ok=True
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_those_of_numpy(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1,), (7, 3), (3, CPU_CHUNK), (2 * CPU_CHUNK + 5,), (0, 3)]
    tensors = [(torch.randn(shape, generator=draw) * 3 + 1).to(dtype) for shape in shapes]
    for tensor in tensors[1:]:
        tensor.view(-1)[::5] = 0
    shifted = (torch.randn(9, generator=draw) * 0.01 + 100).to(dtype)
    views = [tensors[2].t(), tensors[3][::2], shifted.expand(3, 9), shifted.clone().requires_grad_()]
    require_equal([*tensors, *views, -shifted.abs(), torch.zeros(4, dtype=dtype)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=8), min_size=1, max_size=5))
def test_special_values_are_counted(values: list[list[float]]) -> None:
    require_equal([torch.tensor(one, dtype=torch.float64) for one in values])


def test_parts_and_micro_batches_are_joined_as_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "DEVICE_CHUNK", 5000)
    whole = torch.randn(10, 4000, generator=torch.Generator().manual_seed(1)) + 100
    pending = Pending()
    for part in whole.split(3):
        pending.add(("actv", "a"), part)
        pending.alias(("actv", "b"), ("actv", "a"))
    moments, _ = pending.take()
    assert moments["actv", "a"] == moments["actv", "b"]
    assert moments["actv", "a"] == pytest.approx(expected(whole), rel=2e-5)
    pending.add(("actv", "a"), torch.ones(5, 70_000))
    pending.replace(("actv", "a"), torch.full((5, 70_000), 3.0))
    only = pending.take()[0]["actv", "a"]
    assert (only["mean"], only["std"]) == (3.0, 0.0)


@pytest.mark.parametrize("layout", ["coo", "uncoalesced", "csr", "complex"])
def test_a_sparse_tensor_has_the_statistics_of_the_dense_one(layout: str) -> None:
    dense = torch.tensor([[0.0, -2.0, 0.0], [3.0, 0.0, 0.5]])
    sparse = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "uncoalesced": lambda: torch.sparse_coo_tensor(
            torch.tensor([[0, 1, 1, 1], [1, 0, 0, 2]]), torch.tensor([-2.0, 1.0, 2.0, 0.5]), (2, 3)
        ),
        "complex": lambda: (dense * (1 + 2j)).to_sparse(),
    }[layout]()
    exact = dense * (1 + 2j) if layout == "complex" else dense
    first, second = found([sparse, exact])
    assert first == pytest.approx(second)
    assert second["zeros"] == 0.5
