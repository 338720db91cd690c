"""The copies of modules that an examination runs, and the differences of their outputs."""

import math

import torch
from torch import nn

from ra.admission.probe import difference, pristine


class Caching(nn.Module):
    """A module with a cache that its part shares."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, int] = {}
        self.part = nn.Linear(2, 2)
        self.part.cache = self.cache  # type: ignore[assignment]


def test_a_copy_has_dicts_of_its_own_and_its_parts_share_what_they_shared() -> None:
    original = Caching()
    first, second = pristine(original), pristine(original)
    first.cache[1] = 2
    first.part.register_forward_hook(lambda module, x, y: 0 * y)
    assert first.part.cache is first.cache
    assert original.cache == second.cache == {}
    for module in (original, second):
        assert module.part(torch.ones(1, 2)).any()
    assert not first.part(torch.ones(1, 2)).any()


def test_equal_outputs_have_no_difference_and_a_nan_differs_from_a_number() -> None:
    x_BTC = torch.arange(12.0).view(1, 4, 3)
    other = x_BTC.clone()
    assert difference(x_BTC, other) == (0.0, 0)
    other[0, 2, 1] += 1.1
    assert difference(x_BTC, other) == (float(torch.tensor(8.1) - 7) / 11, 2)
    other[0, 2, 1] = math.nan
    assert difference(x_BTC, other) == (math.inf, 2)
    assert difference(other, other) == (0.0, 0)
