"""Variants with custom parameters: reported, initialised equally in every process, resumed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gpt2.initial_weights import initialise, keyed_normal, shared_names, weights_digest
from gpt2.predicted_memory import StepWorkload, predict
from gpt2.trainer import TrainingRun
from gpt2.training_step import build_model
from gpt2.transformer import CausalSelfAttention, ModelParts, UnsetLinear
from runtime import run_record
from runtime.signals import Stop
from study.runs import read_runs
from tests import small_runs
from tests.small_runs import StopAfter, same


class Rich(CausalSelfAttention):
    """A custom matrix, bias, norm, 2-D and 1-D parameter, and a layer without initial values."""

    def __init__(self) -> None:
        super().__init__(16, 2)
        self.extra = nn.Linear(16, 16)
        self.extra_norm = nn.LayerNorm(16)
        nn.init.constant_(self.extra_norm.weight, 0.5)
        self.table = nn.Parameter(torch.zeros(2, 4))
        self.scale = nn.Parameter(torch.rand(16))
        self.unset = UnsetLinear(16, 16)

    def forward(self, x_BTC: Tensor) -> Tensor:
        custom = self.unset(self.extra_norm(self.extra(x_BTC))) * self.scale
        return super().forward(x_BTC) + custom * (1 + self.table.sum())


class Wider(CausalSelfAttention):
    """Twice the heads, so that both matrices have another shape than the standard ones."""

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.qkv, self.proj = nn.Linear(16, 96), nn.Linear(32, 16)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, T, _ = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(B, T, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return q, k, v


class Another(nn.Module):
    """Without any part of the standard attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x_BTC: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x_BTC.cumsum(1))
        return mixed


CUSTOM: dict[str, Callable[[], nn.Module]] = {"RICH": Rich, "WIDER": Wider, "ANOTHER": Another}


def start(study: Path, texts: Path, name: str, stop: Stop | None = None, seed: int = 0) -> TrainingRun:
    module = CUSTOM.get(name)
    attention = None if module is None else lambda layer: module()
    directory = study / "runs" / run_record.run_name(name, seed)
    return small_runs.start(
        directory, small_runs.configuration(texts, 4), name, stop, seed=seed, attention=attention
    )


@pytest.mark.parametrize("name", CUSTOM)
def test_a_variant_with_custom_parameters_is_reported(tmp_path: Path, texts: Path, name: str) -> None:
    for each in ("B", name):
        assert start(tmp_path, texts, each).train() == "finished"
    runs = read_runs(tmp_path)
    assert [(run.variant, run.used, run.why_not) for run in runs] == [("B", True, ""), (name, True, "")]


@pytest.mark.parametrize("name", CUSTOM)
def test_initial_weights_depend_on_variant_and_seed_and_not_on_the_random_state(
    tmp_path: Path, texts: Path, name: str
) -> None:
    torch.manual_seed(1)
    one = start(tmp_path / "one", texts, name).stepper.model.state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = start(tmp_path / "second", texts, name).stepper.model.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert same(dict(one), dict(second))
    other = start(tmp_path / "other", texts, name, seed=1).stepper.model.state_dict()
    differing = {key for key in one if not torch.equal(one[key], other[key])}
    custom = {"RICH": "scale", "WIDER": "qkv.weight", "ANOTHER": "mix.weight"}[name]
    assert f"blocks.0.attention.{custom}" in differing
    assert not torch.equal(one[f"blocks.0.attention.{custom}"], one[f"blocks.1.attention.{custom}"])


def test_a_run_with_custom_parameters_resumes_to_the_same_bits(tmp_path: Path, texts: Path) -> None:
    whole = start(tmp_path / "whole", texts, "RICH")
    assert whole.train() == "finished"
    assert start(tmp_path / "resumed", texts, "RICH", StopAfter(3)).train() == "interrupted"
    resumed = start(tmp_path / "resumed", texts, "RICH")
    assert resumed.train() == "finished"
    assert same(dict(resumed.stepper.model.state_dict()), dict(whole.stepper.model.state_dict()))


def test_custom_parameters_retain_the_values_of_their_module_and_unset_ones_are_initialised(
    texts: Path,
) -> None:
    config = small_runs.configuration(texts, 4)
    plain = build_model(config.model, None)
    model = build_model(config.model, ModelParts(attention=lambda layer: Rich()))
    before = {name: value.clone() for name, value in model.named_parameters()}
    initialise(plain, 3)
    named = initialise(model, 3)
    after = dict(model.named_parameters())
    custom = [name for name in after if name not in dict(plain.named_parameters())]
    assert len(custom) == 2 * 8
    for name in custom:
        if ".unset." in name:
            expected = (
                0.02 * keyed_normal(3, name, after[name].shape) if "weight" in name else 0 * after[name]
            )
            assert torch.equal(after[name], expected)
            assert name in named
        else:
            assert torch.equal(after[name], before[name]), name
            assert name not in named
    for name, value in plain.named_parameters():
        assert torch.equal(after[name], value), name


def test_the_weights_digest_covers_exactly_the_shared_tensors(texts: Path) -> None:
    config = small_runs.configuration(texts, 4)
    plain = build_model(config.model, None)
    initialise(plain, 3)
    standard = weights_digest(plain, 3)
    for create in CUSTOM.values():
        model = build_model(config.model, ModelParts(attention=lambda layer, create=create: create()))  # type: ignore[misc]
        initialise(model, 3)
        assert weights_digest(model, 3) == standard
        shared = set(shared_names(model))
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                value = parameter.flatten()[0].clone()
                parameter.view(-1)[0] += 1
                assert (weights_digest(model, 3) != standard) == (name in shared), name
                parameter.view(-1)[0] = value
    assert weights_digest(plain, 4) == standard  # present values are not drawn


@pytest.mark.parametrize("name", CUSTOM)
def test_the_memory_of_a_variant_with_custom_parameters_is_predicted(texts: Path, name: str) -> None:
    config = small_runs.configuration(texts, 4)
    before = torch.get_rng_state()
    standard = predict(StepWorkload(config.model, config.optimizer, None, 2, 2, "cpu", "float32"))
    parts = ModelParts(attention=lambda layer: CUSTOM[name]())
    work = StepWorkload(config.model, config.optimizer, parts, 2, 2, "cpu", "float32")
    assert (predict(work).peak_bytes > standard.peak_bytes) == (name != "ANOTHER")
    assert torch.equal(torch.get_rng_state(), before)
