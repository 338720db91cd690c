import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpt2.initial_weights import initialise
from gpt2.optimizer import learning_rate, parameter_groups, set_learning_rate
from gpt2.training_step import Stepper
from gpt2.transformer import GPT2, ModelParts
from runtime.batch_plan import plan_batch
from runtime.settings import ModelConfig, OptimizerConfig


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
    built = GPT2(layers=2, heads=2, width=8, block_size=8, vocabulary=11, padded_vocabulary=16,
                parts=ModelParts(attention=lambda layer: Gate()))  # fmt: skip
    initialise(built, 0)
    return built


def test_every_parameter_is_in_exactly_one_group_and_only_matrices_decay() -> None:
    built = model()
    groups = parameter_groups(built, weight_decay=0.1)
    members = [id(p) for group in groups for p in group["params"]]
    assert sorted(members) == sorted(id(p) for p in built.parameters())
    for group in groups:
        assert group["weight_decay"] == (0.1 if all(p.dim() >= 2 for p in group["params"]) else 0.0)


def test_a_custom_parameter_gets_its_learning_rate_multiple_and_no_decay() -> None:
    built = model()
    optimizer = torch.optim.AdamW(parameter_groups(built, weight_decay=0.1))
    set_learning_rate(optimizer, 0.01)
    values = [
        g for g in optimizer.param_groups if any(p is built.blocks[0].attention.logit for p in g["params"])
    ]
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in values] == [(0.5, 0.0, 2)]
    assert all(g["lr"] == 0.01 for g in optimizer.param_groups if g is not values[0])


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


@given(st.floats(0, 1), st.floats(1e-5, 1), st.floats(0, 0.5), st.floats(0.01, 0.5), st.floats(0, 1))
def test_warm_up_stable_decay_is_constant_between_warm_up_and_decay_and_ends_at_its_minimum(
    progress: float, peak: float, warmup: float, decay: float, minimum: float
) -> None:
    def at(progress: float) -> float:
        return learning_rate(
            progress,
            peak=peak,
            warmup_fraction=warmup,
            minimum_ratio=minimum,
            schedule="wsd",
            decay_fraction=decay,
        )

    assert 0 <= at(progress) <= peak
    assert (at(progress) == peak) or progress < warmup or progress > 1 - decay or minimum == 1
    assert math.isclose(at(1.0), peak * minimum, abs_tol=1e-12)
    falling = [at(1 - decay + decay * k / 20) for k in range(21)]
    assert falling == sorted(falling, reverse=True)
    assert math.isclose(
        at(1 - decay * 0.75), peak * (minimum + (1 - minimum) * 0.5), rel_tol=1e-6
    )  # 1 - sqrt(1/4)


def wsd_stepper(warmup: int | None, warmup_fraction: float, decay: float) -> Stepper:
    optimizer = OptimizerConfig(7e-4, 0.1, warmup_fraction, 0.1, 0.9, 0.95, 1e-8, 1.0, "wsd", decay)
    model = ModelConfig("test", 1, 1, 8, 16, 0.0, 11, 16)
    return Stepper(model, optimizer, plan_batch(1, 1, 1, 16), seed=0, device="cpu", dtype="float32",
                   compile=False, parts=None, warmup=warmup)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 5000), st.integers(1, 20000), st.floats(0, 0.5), st.floats(0.001, 0.5))
def test_a_longer_run_has_bitwise_the_same_rates_until_the_decay_of_the_shorter_one(
    short: int, more: int, warmup_fraction: float, decay: float
) -> None:
    long = short + more
    trainer = wsd_stepper(None, warmup_fraction, decay)
    planned = wsd_stepper(trainer.warmup_iterations(short), warmup_fraction, decay)
    start = trainer.decay_start(short)
    assert trainer.warmup_iterations(short) <= start <= planned.decay_start(long)
    steps = {
        k
        for k in (0, 1, trainer.warmup_iterations(short), start // 2, start - 2, start - 1)
        if 0 <= k < start
    }
    steps |= set(range(0, start, max(1, start // 50)))
    assert all(trainer.rate(k, short) == planned.rate(k, long) for k in steps)
    if start < short:
        assert trainer.rate(start, short) < 7e-4
    assert math.isclose(trainer.rate(short - 1, short), 7e-5) or start == short
