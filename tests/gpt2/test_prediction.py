"""Predictions: equal to the tracked peak of a real step, never below the weights, growing with the batch."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from gpt2 import cpu_linear
from gpt2.allocation_tracker import KINDS, AllocationTracker
from gpt2.measured_memory import measure
from gpt2.predicted_memory import StepWorkload, predict, track
from gpt2.validation import EVALUATION_TOKENS
from runtime.settings import ModelConfig, OptimizerConfig

OPTIMIZER = OptimizerConfig(6e-4, 0.1, 0.02, 0.1, 0.9, 0.95, 1e-8, 1.0)
MODEL = ModelConfig("test", 2, 2, 32, 16, 0.0, vocabulary=300, padded_vocabulary=384)


@pytest.fixture(scope="module", autouse=True)
def _short_evaluation() -> Iterator[None]:
    """A quarter of a card's evaluation: most operations of a small model's prediction are its loss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EVALUATION_TOKENS, "card", EVALUATION_TOKENS["card"] // 4)
        yield


def work(
    micro: int = 3, accumulation: int = 2, kind: str = "cpu", dtype: str = "float32", **model
) -> StepWorkload:
    return StepWorkload(
        dataclasses.replace(MODEL, **model), OPTIMIZER, None, micro, accumulation, kind, dtype
    )


def weights_bytes(of: StepWorkload) -> int:
    model = of.model
    each = 12 * model.width**2 + 13 * model.width
    parameters = model.layers * each + (model.padded_vocabulary + model.block_size + 2) * model.width
    return 4 * parameters


@pytest.mark.parametrize(
    ("dtype", "micro", "accumulation", "layers"),
    [("float32", 1, 1, 1), ("bfloat16", 3, 2, 2), ("float32", 4, 1, 3), ("bfloat16", 4, 1, 3)],
)
def test_a_prediction_equals_the_tracked_peak_of_a_real_step(
    dtype: str, micro: int, accumulation: int, layers: int
) -> None:
    workload = work(micro, accumulation, dtype=dtype, layers=layers)
    real, predicted = track(workload, AllocationTracker(), "cpu"), predict(workload).timeline
    assert predicted.by_phase() == real.by_phase()
    assert predicted.by_kind(predicted.peak_event()) == real.by_kind(real.peak_event())


def test_a_prediction_is_within_ten_percent_of_the_allocated_bytes() -> None:
    workload = work(8, 2, width=128, block_size=64, vocabulary=2000, padded_vocabulary=2048)
    measured = measure(workload, "cpu").allocated
    predicted = predict(workload).timeline.by_phase()
    for phase in ("forward", "backward"):
        assert predicted[phase] == pytest.approx(measured[phase], rel=0.1)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_compiled_backward_holds_all_weight_gradients_and_the_accumulated_ones(
    monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """Without Inductor, a compiled step has the eager allocations, so the prediction equals the measured bytes."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend="aot_eager"))
    monkeypatch.setattr(cpu_linear, "MOST_SAVED", 0)  # as aot_eager
    made = work(1, accumulation, width=256, layers=2, block_size=16)
    eager = predict(made).timeline.by_phase()["backward"]
    compiled = dataclasses.replace(made, compile=True)
    measured = measure(compiled, "cpu").allocated["backward"]
    predicted = predict(compiled).timeline.by_phase()["backward"]
    assert predicted == pytest.approx(measured, rel=0.001)
    layers = 4 * 2 * (12 * 256**2 + 13 * 256)  # bytes of their gradients
    assert predicted - eager == pytest.approx(layers if accumulation == 2 else 0, rel=0.2)


@pytest.mark.parametrize(
    ("kind", "dtype", "micro", "layers"),
    [("cpu", "float32", 40, 3), ("cuda", "bfloat16", 7, 2)],
)
def test_the_kinds_of_memory_at_the_peak_add_up_and_include_weights_and_optimizer_state(
    micro: int, layers: int, kind: str, dtype: str
) -> None:
    workload = work(micro, 2, kind, dtype, layers=layers)
    prediction = predict(workload)
    timeline = prediction.timeline
    kinds = timeline.by_kind(timeline.peak_event())
    assert kinds["parameters"] >= weights_bytes(workload)
    assert kinds["optimizer state"] >= 2 * weights_bytes(workload)
    assert set(kinds) == set(KINDS)
    assert sum(kinds.values()) == prediction.peak_bytes == max(timeline.by_phase().values())
