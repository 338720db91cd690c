import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpt2.model import GPT2, initialise
from gpt2.optim import learning_rate, make_optimizer, parameter_groups, set_learning_rate


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.logit = nn.Parameter(torch.tensor(0.0))

    def optimizer_settings(self) -> dict[str, float]:
        return {"logit": 50.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.logit
        return out


def model() -> GPT2:
    made = GPT2(layers=2, heads=2, width=8, block_size=8, vocabulary=11, padded_vocabulary=16,
                attention=lambda layer: Gate())  # fmt: skip
    initialise(made, 0)
    return made


def test_every_parameter_is_in_exactly_one_group_and_only_matrices_decay() -> None:
    made = model()
    groups = parameter_groups(made, weight_decay=0.1)
    members = [id(p) for group in groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in made.parameters())
    for group in groups:
        assert group["weight_decay"] == (0.1 if all(p.dim() >= 2 for p in group["params"]) else 0.0)


def test_a_modules_own_parameter_gets_its_multiple_and_no_decay() -> None:
    made = model()
    optimizer = make_optimizer(made, learning_rate=1.0, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    set_learning_rate(optimizer, 0.01)
    own = [g for g in optimizer.param_groups if any(p is made.blocks[0].attention.logit for p in g["params"])]
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in own] == [(0.5, 0.0, 2)]
    assert all(g["lr"] == 0.01 for g in optimizer.param_groups if g is not own[0])


@given(st.floats(0, 1), st.floats(1e-5, 1), st.floats(0, 0.9), st.floats(0, 1))
def test_the_learning_rate_stays_between_zero_and_its_peak(
    progress: float, peak: float, warmup: float, minimum: float
) -> None:
    rate = learning_rate(progress, peak=peak, warmup_fraction=warmup, minimum_ratio=minimum)
    assert 0 <= rate <= peak * (1 + 1e-12)
    if progress >= warmup:
        assert rate >= peak * minimum * (1 - 1e-9)


def test_the_learning_rate_warms_up_peaks_and_ends_at_its_minimum() -> None:
    def at(progress: float) -> float:
        return learning_rate(progress, peak=6e-4, warmup_fraction=0.1, minimum_ratio=0.1)

    assert math.isclose(at(0.05), 3e-4)
    assert math.isclose(at(0.1), 6e-4)
    assert math.isclose(at(0.55), 6e-4 * 0.55)
    assert math.isclose(at(1.0), 6e-5)
    rising = [at(k / 1000) for k in range(101)]
    falling = [at(k / 1000) for k in range(100, 1001)]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
