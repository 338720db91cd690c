"""Test the noise of norms: its formula, its gradient, its draws, training against evaluation, runs and resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.trainer import TrainingRun
from ra.noise import NoisyLayerNorm, NoisyRMSNorm, add_noise
from ra.noise_schedule import NoiseSchedule
from runtime import run_record
from tests import small_runs
from tests.small_runs import StopAfter, same

SCHEDULE = NoiseSchedule(0.5, 0.05, 4)
NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(16),
    "no bias": lambda: nn.LayerNorm(16, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(16, eps=1e-6),
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return small_runs.write_texts(tmp_path / "texts")


def noisy(kind: str) -> NoisyLayerNorm | NoisyRMSNorm:
    norm = NORMS[kind]()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    found = add_noise(norm, SCHEDULE)
    assert isinstance(found, NoisyLayerNorm | NoisyRMSNorm)
    assert found.state_dict().keys() == norm.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], value) for name, value in norm.state_dict().items())
    return found


def normalised(kind: str, x: Tensor, eps: float) -> Tensor:
    centred = x if kind == "RMSNorm" else x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("kind", NORMS)
def test_the_formula_and_its_gradients_in_float64(kind: str) -> None:
    norm = noisy(kind).double()
    norm.draw_noise("a", 0, 5, 10)
    assert norm.noise.abs().max() > 0
    x = torch.randn(
        3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True
    )
    weight_out = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x_hat = normalised(kind, x, norm.eps)
    bias = getattr(norm, "bias", None)
    expected = (norm.weight + norm.noise) * x_hat + (0 if bias is None else bias)
    found = norm.train()(x)
    assert torch.allclose(found, expected, atol=1e-12)
    (gradient,) = torch.autograd.grad((found * weight_out).sum(), norm.weight)
    assert torch.allclose(
        gradient, (weight_out * x_hat).sum((0, 1)), atol=1e-12
    )  # that of a norm without noise
    plain = norm.eval()(x)
    assert torch.allclose(plain, norm.weight * x_hat + (0 if bias is None else bias), atol=1e-12)
    norm.train().clear_noise()
    assert torch.equal(norm(x), plain)


@pytest.mark.parametrize("kind", NORMS)
def test_without_noise_a_norm_is_torchs_to_the_bit(kind: str) -> None:
    norm, x = noisy(kind), torch.randn(2, 3, 16)
    plain = (
        F.rms_norm(x, (16,), norm.weight, norm.eps)
        if kind == "RMSNorm"
        else F.layer_norm(x, (16,), norm.weight, norm.bias, norm.eps)
    )
    norm.draw_noise("a", 0, 9, 10)
    assert torch.equal(norm.eval()(x), plain)


def test_draws_are_a_function_of_seed_step_and_module_with_the_size_of_the_schedule() -> None:
    norm = add_noise(nn.LayerNorm(4096), SCHEDULE)
    assert isinstance(norm, NoisyLayerNorm)

    def drawn(name: str = "a", seed: int = 0, iteration: int = 3, iterations: int = 10) -> Tensor:
        torch.rand(1)  # other draws change nothing
        norm.draw_noise(name, seed, iteration, iterations)
        return norm.noise.clone()

    assert torch.equal(drawn(), drawn())
    others = [drawn("b"), drawn(seed=1), drawn(iteration=4)]
    assert all(abs(float((drawn() * other).mean())) < 0.02 for other in others)
    for iteration in range(12):
        size = SCHEDULE.sigma(iteration, 12)
        assert float(drawn(iteration=iteration, iterations=12).std()) == pytest.approx(size, rel=0.05)


def test_a_compiled_model_is_not_compiled_anew_for_a_draw() -> None:
    norm, x = noisy("LayerNorm"), torch.randn(2, 3, 16)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    norm.draw_noise("a", 0, 5, 10)
    compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        for iteration in (0, 6, 9):
            norm.draw_noise("a", 0, iteration, 10)
            assert torch.equal(compiled(x), norm(x))


def start(study: Path, texts: Path, name: str, stop: StopAfter | None = None) -> TrainingRun:
    folder = study / "runs" / run_record.run_name(name, 0)
    return small_runs.start(folder, small_runs.configuration(texts, 12), name, stop)


@pytest.mark.parametrize("name", ["B+AQN=strong", "RALEARN+AQN=0.5:0.05:4:final"])
def test_a_run_with_noise_resumes_to_the_same_numbers_and_evaluates_without_it(
    tmp_path: Path, texts: Path, name: str
) -> None:
    whole = start(tmp_path / "whole", texts, name)
    assert whole.train() == "finished"
    assert start(tmp_path / "parts", texts, name, StopAfter(9)).train() == "interrupted"
    assert start(tmp_path / "parts", texts, name).train() == "finished"
    folder = Path("runs") / run_record.run_name(name, 0)
    first, second = (small_runs.outcome(tmp_path / kind / folder) for kind in ("whole", "parts"))
    assert same(first, second)
    assert not any("noise" in entry for entry in first[0]["model"])
    norms = [module for module in whole.stepper.model.modules() if hasattr(module, "draw_noise")]
    assert len(norms) == (5 if name.endswith("final") else 4)
    base = start(tmp_path / "base", texts, name.partition("+")[0])
    assert base.train() == "finished"
    losses, plain = first[2], small_runs.outcome(tmp_path / "base/runs" / f"{name.partition('+')[0]}0")[2]
    assert losses[:1] == plain[:1]  # interval 0 has no noise
    assert losses[-1] != plain[-1]


def test_the_noise_is_the_same_over_the_micro_batches_of_a_step(texts: Path, tmp_path: Path) -> None:
    run = start(tmp_path, texts, "B+AQN=strong")
    seen: list[Tensor] = []
    norm = run.stepper.model.blocks[0].norm1
    norm.register_forward_pre_hook(lambda module, _: seen.append(module.noise.clone()))
    ids = torch.arange(4 * 17).view(4, 17) % 50
    run.stepper.step(ids, 5, 10)
    run.stepper.step(ids, 6, 10)
    assert len(seen) == 4  # two micro-batches a step
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[1], seen[2])
