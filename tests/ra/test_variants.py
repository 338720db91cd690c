"""Test the models that arms build: parts of files, matched widths, recipes, initial weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt2.initial_weights import initialise, weights_digest
from gpt2.training_step import build_model
from gpt2.transformer import GPT2
from ra import arms
from ra.arms import VariantError
from ra.counts import count
from ra.variants import Variant, variant
from runtime.settings import AlternationSettings, ModelConfig
from tests import small_runs

MODEL = ModelConfig("test", 2, 2, 16, 16, 0.0, 97, 128)
ALTERNATION = AlternationSettings("output", 0.5, 100.0)
PARTS = """
from torch import nn
from gpt2.transformer import LearnedPosition, MLP


class Norm(nn.LayerNorm):
    pass


def norm(layer, spec):
    return Norm(spec.width, bias=False)


def mlp(layer, spec):
    return nn.Sequential(MLP(spec.width, spec.dropout), nn.Identity())


class Rotated(nn.Module):
    def forward(self, x_BTC, start=0):
        return x_BTC

    def rotate(self, q, k, start=0):
        return q.flip(-1), k.flip(-1)


def position(spec):
    return Rotated()


recipe = {"weight_decay": 0.2, "learning_rate": 5e-4}
"""
fresh = (f"part_file_{number}" for number in itertools.count())  # a module is imported once
Custom = Callable[[str], str]


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Custom:
    """Write a file into an empty ra/custom; return its name without .py."""
    monkeypatch.setattr(arms, "CUSTOM_FOLDER", tmp_path)
    monkeypatch.setattr("ra.custom.__path__", [str(tmp_path)])

    def write(text: str) -> str:
        stem = next(fresh)
        (tmp_path / f"{stem}.py").write_text(text)
        return stem

    return write


def build(name: str, model: ModelConfig = MODEL) -> tuple[Variant, GPT2]:
    chosen = variant(name, model, ALTERNATION)
    built = build_model(chosen.model, chosen.parts)
    initialise(built, 0)
    return chosen, built


def test_a_file_without_attention_has_standard_attention_and_its_other_parts(custom: Custom) -> None:
    chosen, model = build(custom(PARTS).upper())
    assert type(model.blocks[0].attention).__name__ == "CausalSelfAttention"
    norms = [model.norm, *(norm for block in model.blocks for norm in (block.norm1, block.norm2))]
    assert {type(norm).__name__ for norm in norms} == {"Norm"}
    assert {type(block.mlp).__name__ for block in model.blocks} == {"Sequential"}
    assert type(model.position).__name__ == "Rotated"
    assert chosen.recipe == {"weight_decay": 0.2, "learning_rate": 5e-4}


def test_a_modifier_takes_one_part_of_a_file_and_leaves_its_others(custom: Custom) -> None:
    stem = custom(PARTS)
    chosen, model = build(f"RALEARN+NORM={stem}")
    assert type(model.norm).__name__ == "Norm"
    assert type(model.blocks[0].mlp).__name__ == "MLP"
    assert type(model.blocks[0].attention).__name__ == "LearnedAttention"
    assert chosen.recipe == {}
    assert chosen.cost_class == f"learned-output+norm={stem}"
    with pytest.raises(
        VariantError, match=r"gated\.py defines attention and no norm; fix: name another file"
    ):
        build("B+NORM=gated")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("recipe = {'lr': 1e-3}", "recipe has no setting lr; settings: learning_rate"),
        ("recipe = {'beta2': 1.0}", r"recipe: beta2 is 1\.0, not a number in \[0, 1\)"),
        ("recipe = {'beta2': True}", "not a number"),
        ("recipe = [1]", "recipe is list, not a dictionary"),
        ("def norm(layer, spec):\n    return 3", r"norm\(0, spec\) returned int"),
        ("def position(spec):\n    return 3", r"position\(spec\) returned int"),
        ("def mlp(layer, spec):\n    return spec.widht", "line 2: AttributeError"),
    ],
)
def test_a_faulty_part_is_named_with_its_line(custom: Custom, text: str, says: str) -> None:
    with pytest.raises(VariantError, match=says) as caught:
        build(custom(text + "\n").upper())
    assert "\n" not in str(caught.value)


def test_a_warm_up_and_a_decay_beyond_the_budget_are_refused(custom: Custom) -> None:
    config = small_runs.configuration(Path("texts"), 1)
    optimizer = replace(config.optimizer, schedule="wsd", decay_fraction=0.8)
    config = replace(config, optimizer=optimizer)
    variant("B+WARMUP=0.2", MODEL, ALTERNATION).configure(config)
    with pytest.raises(VariantError, match=r"warmup_fraction 0.3 and CONFIG_DECAY_FRACTION=0.8 .*; fix:"):
        variant("B+WARMUP=0.3", MODEL, ALTERNATION).configure(config)


def test_both_norms_of_a_layer_draw_numbers_of_their_own(custom: Custom) -> None:
    name = custom(
        "import torch\nfrom torch import nn\n\n\nclass Drawn(nn.LayerNorm):\n    def __init__(self, width):\n"
        "        super().__init__(width)\n        self.drawn = nn.Parameter(torch.randn(width))\n\n\n"
        "def norm(layer, spec):\n    return Drawn(spec.width)\n",
    )
    parts = variant(f"B+NORM={name}", MODEL, ALTERNATION).parts
    one, same, other = (build_model(MODEL, parts, seed) for seed in (1, 1, 2))
    draws = [norm.drawn for norm in one.modules() if hasattr(norm, "drawn")]
    assert len({tuple(drawn.tolist()) for drawn in draws}) == 2 * MODEL.layers + 1
    assert torch.equal(one.blocks[0].norm2.drawn, same.blocks[0].norm2.drawn)
    assert not torch.equal(one.blocks[0].norm2.drawn, other.blocks[0].norm2.drawn)


def test_a_rotation_reaches_every_attention_and_refuses_one_without_a_place(custom: Custom) -> None:
    stem = custom(PARTS)
    model = build(f"B+POSITION={stem}")[1].eval()
    ids = torch.arange(8)[None]
    expected = build("B")[1].eval()
    with torch.no_grad():
        expected.position.weight.zero_()
        assert torch.allclose(
            model(ids), expected(ids), atol=1e-6
        )  # flipped channels of both: the same scores
    other = custom("from torch import nn\n\n\ndef attention(layer, spec):\n    return nn.Identity()\n")
    with pytest.raises(TypeError, match="Identity is not a CausalSelfAttention"):
        build(f"{other.upper()}+POSITION={stem}")


def test_shared_parameters_start_equal_and_the_digest_covers_those_of_the_study(custom: Custom) -> None:
    stem = custom(PARTS)
    base = dict(build("B")[1].named_parameters())
    model = build(f"B+NORM={stem}+POSITION={stem}")[1]
    for name, parameter in model.named_parameters():
        assert name not in base or torch.equal(parameter, base[name]), name
    long = ModelConfig("long", 2, 2, 16, 512, 0.0, 97, 128)
    shapes = {name: parameter.shape for name, parameter in build("B", long)[1].named_parameters()}
    wide = build("B+WIDTH=flops:RALEARN", long)[1]
    assert wide.token.weight.shape[1] > MODEL.width
    other = build(f"B+NORM={stem}+POSITION={stem}", long)[1]
    digests = {weights_digest(each, 0, shapes) for each in (build("B", long)[1], other, wide)}
    assert len(digests) == 1
    assert weights_digest(wide, 1, shapes) not in digests


@pytest.mark.parametrize("size", [MODEL, ModelConfig("wide", 3, 4, 64, 32, 0.0, 97, 128)])
@pytest.mark.parametrize("name", ["B", "RALEARN", "GATED", "DIFFERENTIAL"])
def test_counts_are_those_of_the_built_model(size: ModelConfig, name: str) -> None:
    chosen = variant(name, size, ALTERNATION)
    model = build_model(chosen.model, chosen.parts)
    found = count(chosen.model, chosen.parts)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    # WINDOW computes fewer products than the formula counts; the others agree but for vectors and small products
    assert found.flops == pytest.approx(model.flops_per_token(), rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "B+WIDTH=match:GATED",
        "B+WIDTH=flops:RALEARN",
        "GATED+WIDTH=match",
        "LENS+MLP=swiglu+WIDTH=flops",
    ],
)
def test_the_matched_width_is_the_nearest_of_all(name: str) -> None:
    size = ModelConfig("wide", 2, 4, 64, 32, 0.0, 97, 128)
    chosen = variant(name, size, ALTERNATION)
    attention, _, modifier = name.partition("+WIDTH=")
    cost, _, other = modifier.partition(":")

    @functools.cache
    def at(width: int) -> float:
        sizes = ModelConfig("wide", 2, 4, width, 32, 0.0, 97, 128)
        found = count(sizes, variant(attention, sizes, ALTERNATION).parts).of(cost)
        assert found
        return found

    target = count(size, variant(other or "B", size, ALTERNATION).parts).of(cost)
    assert target
    assert at(32) < target < at(104)  # the costs rise with the width
    best = min(range(32, 105, 4), key=lambda width: abs(at(width) - target))
    assert chosen.model.width == best
    assert f"{at(best) / target:.3f} times those of {other or 'B'}" in chosen.note
    assert chosen.cost_class.endswith(f"+WIDTH={best}")
    assert chosen.model.heads == 4
